"""Fits lines to the width of the terminal."""

from __future__ import annotations

import os
from typing import TextIO


def width(stream: TextIO) -> int | None:
    """Width in columns of the terminal that `stream` writes to. None for a file or a pipe, whose lines are not cut.
    COLUMNS takes precedence over the terminal's own width."""
    if not stream.isatty():
        return None
    if (asked := os.environ.get("COLUMNS", "")).isdecimal() and int(asked):
        return int(asked)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except OSError:  # the stream has no file descriptor
        return None


def fit(line: str, stream: TextIO) -> str:
    """The line, cut to the width of `stream`'s terminal."""
    columns = width(stream)
    return line if columns is None or len(line) <= columns else f"{line[: columns - 1]}…"
