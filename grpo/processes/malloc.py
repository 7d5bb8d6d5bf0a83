"""How glibc's allocator treats freed memory.

By default glibc returns large freed blocks to the kernel, and the next allocation faults in every page again, filled
with zeros. In one training step on a CPU this amounts to several times the size of all activations. On systems without
glibc the functions here do nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_NEVER = -1
_LARGE = 2**30


def keep_freed_memory() -> None:
    """Makes this process keep freed memory and reuse it for later allocations, unless the environment sets one of
    glibc's own variables for that."""
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        return
    _set(_TRIM_THRESHOLD, _NEVER)
    _set(_MMAP_THRESHOLD, _LARGE)


def trim() -> None:
    """Returns all free memory to the kernel."""
    if malloc_trim := _function("malloc_trim"):
        malloc_trim(0)


def _set(option: int, value: int) -> None:
    if mallopt := _function("mallopt"):
        mallopt(option, value)


def _function(name: str) -> Any:
    return getattr(_LIBRARY, name, None)


_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None
