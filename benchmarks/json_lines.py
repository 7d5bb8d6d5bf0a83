"""Files with a line of JSON for each finished run, so that a benchmark that was killed goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo.errors import InputError


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in the file, oldest first; none if there is no file. A line that a kill cut off is skipped.

    Raises:
        InputError: it is no file of text, or may not be read.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(f"{path}: the journal cannot be read: {why}; give another file") from None
    found = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # empty, or cut off
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def add_line(path: Path, record: Mapping[str, Any]) -> None:
    line = json.dumps(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:  # the first newline ends a line that a kill cut off
        file.write(f"\n{line}\n")
