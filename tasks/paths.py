"""Paths that a user gives."""

from __future__ import annotations

from pathlib import Path

from grpo.errors import InputError


def expanded(path: str | Path) -> Path:
    """The path with ~ and ~USER replaced by a home folder.

    Raises:
        InputError: there is no such user, or this machine knows no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{path}: {Path(path).parts[0]} is no user's home folder; write the whole path") from None
