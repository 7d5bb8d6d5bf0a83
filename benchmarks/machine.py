"""The machine that a benchmark ran on, in words."""

from __future__ import annotations

import os
import platform
import time


def machine() -> str:
    system = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    threads = os.environ.get("OMP_NUM_THREADS")  # another number rounds otherwise, and trains another model
    return f"{os.cpu_count()} CPU cores ({system}{f', OMP_NUM_THREADS={threads}' if threads else ''})"


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
