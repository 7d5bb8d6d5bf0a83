"""Files with a line of JSON for each finished run, so that a benchmark that was killed goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in the file, oldest first; none if there is no file. A line that a kill cut off is skipped."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:  # empty, or cut off
            continue
    return found


def add_line(path: Path, record: Mapping[str, Any]) -> None:
    line = json.dumps(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:  # the first newline ends a line that a kill cut off
        file.write(f"\n{line}\n")
