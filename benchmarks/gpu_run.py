"""Runs the parts of benchmarks/gpu.py, each in a process of its own, and all of them within a total time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_throughput import environment

HERE = Path(__file__).parent
SCRIPT = HERE / "gpu.py"
LEAST, GRACE = 15.0, 10.0
"""Seconds: a part with less time is not started, because Python and torch alone take as long; and how long a part that
is stopped may take to end its own jobs."""

Result = dict[str, Any]


def run_parts(names: Sequence[str], limit: float, ends: float) -> Iterator[tuple[str, Result | None]]:
    """Name and result of each part, in this order. None for those that have no time before `ends`, as told by
    `time.perf_counter`."""
    for name in names:
        began = time.perf_counter()
        left = ends - GRACE - began
        if left < LEAST:
            yield name, None
            continue
        result = run_part(name, min(limit, left))
        yield name, result | {"seconds": round(time.perf_counter() - began, 1)}


def run_part(name: str, limit: float) -> Result:
    """What a part prints last; with the end of its error, if it failed or was stopped."""
    command = [sys.executable, str(SCRIPT), *sys.argv[1:], "--part", name, "--limit", f"{limit:g}"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, env=environment(HERE.parent, HERE), start_new_session=True, **pipes)
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        output, _ = stop(process)
        return (last_object(output) or {}) | {"error": [f"not done after {limit:.0f} s"]}
    if process.returncode:
        return (last_object(output) or {}) | {"error": errors.strip().splitlines()[-8:]}
    found = last_object(output)
    return {"error": ["it ended without a result"]} if found is None else found  # {}: nothing to compare with here


def stop(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ends a part and the jobs that it started; what it had printed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.communicate(timeout=GRACE)
    return process.communicate()


def last_object(output: str) -> Result | None:
    """The last line that is a JSON object: libraries print theirs between a part's results and after them."""
    for line in reversed(output.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return None
