"""Distinguishes a full disk from other failures: each library reports it differently, some not at all."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

FULL_BYTES = 2**20
"""A failure with less free space than this counts as caused by a full disk."""
_CODES = {errno.ENOSPC, errno.EDQUOT}
_WORDS = ("No space left on device", "Disk quota exceeded", "database or disk is full")


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder, or of its nearest existing parent, has almost no space left."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free < FULL_BYTES


def says_full(error: BaseException) -> bool:
    """Whether an error, or one of its causes, means a full disk or an exceeded quota."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _CODES) or text_says_full(str(cause)) for cause in causes(error)
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
    return any(words in text for words in _WORDS)
