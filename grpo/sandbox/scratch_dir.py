"""The folder of an untrusted program: its size, and its removal regardless of what the program did to it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat

BLOCK = 4096
"""Minimum size that a file or folder counts as, bytes."""


def size(folder: str) -> int | float:
    """Bytes in `folder`; infinite if folders are nested too deeply for a path."""
    total = 0
    front = [folder]
    while front:
        try:
            entries = list(os.scandir(front.pop()))
        except OSError as error:  # already removed, or unreadable
            if error.errno == errno.ENAMETOOLONG:
                return float("inf")
            continue
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    front.append(entry.path)
                total += max(512 * entry.stat(follow_symlinks=False).st_blocks, BLOCK)
    return total


def remove(folder: str) -> None:
    """Removes `folder`, which no process must be using.

    Deep entries are moved to the top first, so that neither recursion depth nor path length is a limit.
    """
    _open(folder)
    word, count = secrets.token_hex(8), 0
    while entries := _entries(folder):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            _open(entry.path)
            for inner in _entries(entry.path):
                if inner.is_dir(follow_symlinks=False):
                    _open(inner.path)
                    os.rename(inner.path, os.path.join(folder, f"{word}-{count}"))
                    count += 1
                else:
                    os.unlink(inner.path)
            os.rmdir(entry.path)
    os.rmdir(folder)


def _open(folder: str) -> None:
    if not os.path.islink(folder):
        os.chmod(folder, stat.S_IRWXU)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)
