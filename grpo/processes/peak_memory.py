"""The most memory that a job held: on its GPU, or of its process beyond what its libraries take."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from grpo.processes.metrics_log import replace_text

FILE = "memory.json"


class MemoryUsed:
    """Begins when the job's code is loaded, before its models are. In `FILE` beside the job's result the first process
    leaves ``{"peak_bytes": ..., "device": "cuda" | "cpu"}``; what the CUDA allocator keeps without use is not in it.
    Nothing is left where the system does not tell: a processor's numbers are Linux's."""

    def __init__(self) -> None:
        self._before = _resident("VmRSS")

    def write(self, folder: Path) -> None:
        if os.environ.get("RANK", "0") != "0":
            return
        torch = sys.modules.get("torch")  # where nothing has loaded it there is no GPU to ask about
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            found = {"peak_bytes": torch.cuda.max_memory_allocated(), "device": "cuda"}
        elif (peak := _resident("VmHWM")) is not None and self._before is not None:
            found = {"peak_bytes": max(0, peak - self._before), "device": "cpu"}
        else:
            return
        replace_text(folder / FILE, json.dumps(found))


def _resident(name: str) -> int | None:
    """Bytes of this process in memory, now (VmRSS) or at most (VmHWM). getrusage's maximum would not do: it begins with
    that of the process that started this one."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
