"""How far the jobs of a stage are: in the log, and as bars on the page of its run."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flows.progress import Progress

if TYPE_CHECKING:  # imports Prefect, which `r1 plan` does not need
    from flows.stage_contract.run_page import RunPage


@dataclass(frozen=True)
class StageProgress:
    """Progress of the stage `stage`, shown by `line` and on `page`."""

    stage: str
    line: Progress
    page: RunPage

    def show(self, job: str, records: list[dict[str, Any]]) -> None:
        """Shows the last of new records of a job's metrics. Those before it may be of the attempt that a job resumes,
        and say nothing about its speed. `job` is "" if the stage has only one."""
        if records:
            last = records[-1]
            line = self.line.update(self.stage, job, last)
            self.page.progress(job, int(last["step"]), int(last.get("of", 0)), line)

    def of(self, job: str) -> Callable[[int, int], None]:
        """A function that shows how many of a job's items are done, and how many there are. Any thread may call it, but
        not two at once."""
        flow_run = contextvars.copy_context()  # where Prefect finds the flow run
        return lambda done, of: flow_run.run(self.show, job, [{"step": done, "of": of}])
