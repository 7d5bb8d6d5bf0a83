"""Peak memory of a job: on its GPU, or in its process in addition to what the libraries take."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from grpo.processes.metrics_log import replace_text

FILE = "memory.json"


class MemoryUsed:
    """Measures from when the job's code is loaded, before its models are.

    The first process writes ``{"peak_bytes": ..., "device": "cuda" | "cpu"}``, with the `name` of a GPU, to `FILE`
    next to the job's result. Memory that the CUDA allocator reserves but does not use is not counted. On a CPU this
    needs Linux; elsewhere nothing is written.
    """

    def __init__(self) -> None:
        self._before = _resident("VmRSS")

    def write(self, folder: Path) -> None:
        if os.environ.get("RANK", "0") != "0":
            return
        torch = sys.modules.get("torch")  # if nothing has loaded torch, the job has used no GPU
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            name = torch.cuda.get_device_name()
            peak_memory = {"peak_bytes": torch.cuda.max_memory_allocated(), "device": "cuda", "name": name}
        elif (peak := _resident("VmHWM")) is not None and self._before is not None:
            peak_memory = {"peak_bytes": max(0, peak - self._before), "device": "cpu"}
        else:
            return
        replace_text(folder / FILE, json.dumps(peak_memory))


def _resident(name: str) -> int | None:
    """Resident bytes of this process, current (VmRSS) or peak (VmHWM); None if the system does not report them.

    The peak from getrusage is not suitable: a process inherits it from the process that started it.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    line = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    return int(line[1]) * 1024 if line else None
