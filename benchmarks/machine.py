"""The machine that a benchmark ran on, in words."""

from __future__ import annotations

import os
import platform


def machine() -> str:
    system = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    threads = os.environ.get("OMP_NUM_THREADS")  # another number rounds otherwise, and trains another model
    return f"{os.cpu_count()} CPU cores ({system}{f', OMP_NUM_THREADS={threads}' if threads else ''})"
