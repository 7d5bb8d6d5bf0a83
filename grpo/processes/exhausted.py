"""Distinguishes a full disk and exhausted memory from other failures: each library reports them differently, some not
at all."""

from __future__ import annotations

import errno
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from grpo.errors import InputError

FULL_BYTES = 2**20
"""A failure with less free space than this counts as caused by a full disk."""
_DISK_CODES = {errno.ENOSPC, errno.EDQUOT}
_DISK_WORDS = ("No space left on device", "Disk quota exceeded", "database or disk is full")

OUT_OF_MEMORY = (
    "memory ran out: end other programs, or allow more where a limit holds (ulimit -d and -v, a container's limit)"
)
LEAST_BYTES = 200_000_000
"""Below this limit on a process's data, NumPy's OpenBLAS ends the process while it is loaded, in words of its own."""
RUN_BYTES = 600_000_000
"""Below this limit a run fails at a place that depends on the limit, also in libraries that end the process in words of
their own. At 450 MB it failed, at 550 MB a small one did not."""
_MEMORY_WORDS = ("Cannot allocate memory", "failed to map segment from shared object", "std::bad_alloc")


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder, or of its nearest existing parent, has almost no space left."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free < FULL_BYTES


def says_full(error: BaseException) -> bool:
    """Whether an error, or one of its causes, means a full disk or an exceeded quota."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _DISK_CODES) or text_says_full(str(cause))
        for cause in causes(error)
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def text_says_full(text: str) -> bool:
    """Whether a message reports a full disk or an exceeded quota."""
    return any(words in text for words in _DISK_WORDS)


def says_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one of its causes, means that a process could not get more memory."""
    return any(
        isinstance(cause, MemoryError)
        or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)
        or any(words in str(cause) for words in _MEMORY_WORDS)
        for cause in causes(error)
    )


def check_limit(needed: int = LEAST_BYTES) -> None:
    """Raises InputError if a limit (`ulimit -d`) leaves this process less than `needed` bytes."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise InputError(
            f"{OUT_OF_MEMORY}; this process may hold {allowed / 1e6:.0f} MB and needs {needed / 1e6:.0f} MB"
        )
