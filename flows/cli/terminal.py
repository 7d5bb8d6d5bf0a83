"""Lines no longer than the terminal is wide."""

from __future__ import annotations

import os
from typing import TextIO


def width(stream: TextIO) -> int | None:
    """Columns of the terminal that `stream` writes to; None for a file or a pipe, whose lines stay whole. COLUMNS goes
    before what the terminal says."""
    if not stream.isatty():
        return None
    if (asked := os.environ.get("COLUMNS", "")).isdecimal() and int(asked):
        return int(asked)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except OSError:  # it has no descriptor
        return None


def fit(line: str, stream: TextIO) -> str:
    """The line, cut where it is longer than the terminal of `stream` is wide."""
    columns = width(stream)
    return line if columns is None or len(line) <= columns else f"{line[: columns - 1]}…"
