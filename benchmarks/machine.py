"""The machine that a benchmark ran on, in words."""

from __future__ import annotations

import os
import platform


def machine() -> str:
    return f"{os.cpu_count()} CPU cores ({platform.machine()}, {platform.system()}, Python {platform.python_version()})"
