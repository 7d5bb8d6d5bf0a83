"""Command lines of benchmarks: counts, files that are checked before the work and written after it, what was given.

It needs Python alone, because benchmarks/gpu.py also runs where nothing of the project is installed.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """Type of an argument: a whole number of `least` or more."""

    def whole(text: str) -> int:
        if (number := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{number}: give {least} or more")
        return number

    whole.__name__ = "int"  # argparse names the type of what is no number
    return whole


def output_file(text: str) -> Path:
    """Type of an argument: a file to write at the end. What takes hours must not fail there."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; give a file")
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no regular file; give another")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}; make it, or give another file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text}: nothing can be written in {path.parent}; give another file")
    return path


def write_output(path: Path, text: str) -> None:
    """Replaces the file as a whole: a kill leaves the old one or the new one."""
    path = path.resolve()  # of a link, what it leads to
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def shown(arguments: Sequence[str], paths: Collection[str] = (), flags: Collection[str] = ()) -> str:
    """The arguments as a page shows them, a space before each: without the options `paths`, whose values name places of
    this machine, and without `flags`, which only change what is printed."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument in flags or argument.partition("=")[0] in paths:
            skip = not skip and argument in paths
            continue
        kept.append(argument)
    return "".join(f" {shlex.quote(argument)}" for argument in kept)
