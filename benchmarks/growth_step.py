"""One point of benchmarks/growth.py in a process of its own, or in several: [torchrun ...] growth_step.py JOB.json

Runs the job as `python -m grpo.train` does, measures its phases in time and memory, and writes phases-RANK.json beside
the job. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measure import high_water_mb


class Phases:
    """Seconds of each phase, call by call, and the largest resident set of the process in it, MB."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.peak_mb: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        forget_high_water()
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds.setdefault(name, []).append(time.perf_counter() - began)
            self.peak_mb.setdefault(name, []).append(high_water_mb())

    def around_context(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def watched(*args: Any) -> Iterator[Any]:
            with self.phase(name), make(*args) as value:
                yield value

        return watched

    def around_call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            with self.phase(name):
                return function(*args, **options)

        return watched


def forget_high_water() -> None:
    """The kernel counts the largest resident set (VmHWM) anew from here (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def main(job_file: Path) -> int:
    from grpo.rl.model_set import Models
    from grpo.rl.update import Update
    from grpo.train import main as train

    phases = Phases()
    Models.sampler = phases.around_context("sampling", Models.sampler)  # type: ignore[method-assign]
    Models.reference_logprobs = phases.around_context(  # type: ignore[method-assign]
        "measuring", Models.reference_logprobs
    )
    Update.__call__ = phases.around_call("update", Update.__call__)  # type: ignore[method-assign]
    forget_high_water()
    idle = high_water_mb()
    began = time.perf_counter()
    code = train([str(job_file)])
    result = {
        "job_s": time.perf_counter() - began,
        "idle_mb": idle,
        "last_mb": high_water_mb(),
        "seconds": phases.seconds,
        "peak_mb": phases.peak_mb,
    }
    rank = int(os.environ.get("RANK", "0"))
    job_file.with_name(f"phases-{rank}.json").write_text(json.dumps(result))
    if rank == 0:
        print("{}")
    return code


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(Path(sys.argv[1])))
