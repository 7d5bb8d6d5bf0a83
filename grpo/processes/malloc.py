"""What becomes of memory that is freed, where glibc hands it out.

Left to itself it returns large blocks to the kernel, and these come back page by page, filled with zeros: in a step of
training on a CPU several times over all activations. Elsewhere nothing here does anything.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_NEVER = -1
_LARGE = 2**30


def keep() -> None:
    """From now on this process keeps what it frees, for itself to take again."""
    _set(_TRIM_THRESHOLD, _NEVER)
    _set(_MMAP_THRESHOLD, _LARGE)


def give_back() -> None:
    """To the kernel, whatever is free now."""
    if trim := _function("malloc_trim"):
        trim(0)


def _set(option: int, value: int) -> None:
    if mallopt := _function("mallopt"):
        mallopt(option, value)


def _function(name: str) -> Any:
    return getattr(_LIBRARY, name, None)


_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None
