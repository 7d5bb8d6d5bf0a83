"""Prints lines that fit the width of the terminal: rows of tables are cut, messages continue on the next line."""

from __future__ import annotations

import os
import sys
import textwrap
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


def fold(text: str, stream: TextIO, indent: str = "") -> str:
    """The text with line breaks at the width of `stream`'s terminal. `indent`: what further lines begin with."""
    columns = width(stream)
    if columns is None or len(text) <= columns:
        return text
    return textwrap.fill(text, columns, subsequent_indent=indent if len(indent) < columns else "")


def print_row(line: str, stream: TextIO | None = None) -> None:
    """Prints a row of a table. `stream`: standard output if None."""
    print(fit(line, stream or sys.stdout), file=stream or sys.stdout)


def print_text(text: str, stream: TextIO | None = None, indent: str = "") -> None:
    """Prints a message of which nothing may be lost. `stream`: standard output if None."""
    print(fold(text, stream or sys.stdout, indent), file=stream or sys.stdout)
