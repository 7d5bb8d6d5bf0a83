"""Measurements of a stage's build: the machine it ran on, and the peak memory of its jobs."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from grpo.processes.peak_memory import FILE


@dataclass(frozen=True)
class Usage:
    """`machine` is the name of the GPU, or of the CPU with its number of cores; None if another project's trainer ran a
    job, because what its processes use is not measured. `peak_memory` is in bytes, for the first process of the largest
    job: on its GPU, or in host memory beyond its libraries. It is 0 if the stage has no job that was measured."""

    machine: str | None
    peak_memory: int


def usage(work: Path) -> Usage:
    """Usage of a build whose jobs ran in the subfolders of `work`."""
    peak, machine = 0, None
    for path in sorted(work.glob(f"*/{FILE}")):
        try:
            job = json.loads(path.read_text())
            size, device = int(job["peak_bytes"]), str(job.get("name") or "")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a missing measurement must not fail the stage
        peak, machine = max(peak, size), device or machine
    return Usage(None if _has_other_trainer(work) else machine or processor_name(), peak)


def _has_other_trainer(work: Path) -> bool:
    from tasks.trainer.launch import JOB, hardware_of  # loads NumPy, which `r1 --help` does without

    for path in work.glob(f"*/{JOB}"):
        with contextlib.suppress(OSError, ValueError):  # an earlier version may have written it
            if hardware_of(json.loads(path.read_text())).trainer is not None:
                return True
    return False


@cache
def processor_name() -> str:
    """Name of the CPU and its number of cores, for example "AMD EPYC 7B13, 2 cores"."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    cores = os.cpu_count() or 1
    return f"{found[1].strip() if found else platform.machine()}, {cores} core{'s' if cores > 1 else ''}"
