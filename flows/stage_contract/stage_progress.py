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
        """Shows records of a job's metrics; the bar shows the last one. `job` is "" if the stage has only one."""
        lines = [self.line.update(self.stage, job, record) for record in records]
        if records:
            last = records[-1]
            self.page.progress(job, int(last["step"]), int(last.get("of", 0)), lines[-1])

    def of(self, job: str) -> Callable[[int, int], None]:
        """A function that shows how many of a job's items are done, and how many there are. Any thread may call it, but
        not two at once."""
        flow_run = contextvars.copy_context()  # where Prefect finds the flow run
        return lambda done, of: flow_run.run(self.show, job, [{"step": done, "of": of}])
