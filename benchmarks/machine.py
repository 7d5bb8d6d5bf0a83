"""The machine that a benchmark ran on, in words."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

INSTRUCTIONS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "bfloat16", "amx_bf16": "AMX"}
"""Flags of /proc/cpuinfo that decide how fast a CPU multiplies, and their names."""


def machine() -> str:
    system = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    threads = os.environ.get("OMP_NUM_THREADS")  # another number rounds otherwise, and trains another model
    return f"{os.cpu_count()} CPU cores ({cpu()}{system}{f', OMP_NUM_THREADS={threads}' if threads else ''})"


def machines(records: Iterable[Mapping[str, Any]]) -> str:
    """The machines of the records of a study, in words."""
    return " and on ".join(dict.fromkeys(record.get("machine", "a machine that is not recorded") for record in records))


def cpu(described: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name and instructions, as "Intel Xeon Processor with AVX2, AVX-512; "; empty where Linux does not
    tell them."""
    text = described.read_text() if described.is_file() else ""
    name, flags = (re.search(rf"^{of}\s*: (.+)$", text, re.MULTILINE) for of in ("model name", "flags"))
    if not (name and flags):
        return ""
    words = re.sub(r"\((R|TM)\)|\bCPU\b|@.*", "", name[1]).split()
    known = [INSTRUCTIONS[flag] for flag in INSTRUCTIONS if flag in flags[1].split()]
    return f"{' '.join(words)} with {', '.join(known) or 'no AVX2'}; "


def peak_flops_per_s(size: int = 2048, runs: int = 8) -> float:
    """Of a float32 matrix product of torch in as many threads as it has here: the fastest of some."""
    import torch

    a, b = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - began)
    return 2.0 * size**3 / min(seconds)
