"""verl's log of a run, under this library's names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RATE = "learning_rate"


class Records:
    """What verl adds to the file of its logger. verl empties that file when it starts, so each attempt has one of its
    own.

    `names`: verl's name -> ours; others keep theirs, below `verl/`. `first_rate`: learning rate of the first step,
    because verl logs with each step the rate of the next one.
    """

    def __init__(self, file: Path, names: Mapping[str, str], first_rate: float):
        self._file, self._names, self._rate = file, names, first_rate
        self._offset = 0
        file.unlink(missing_ok=True)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for verl."""
        return {"VERL_FILE_LOGGER_PATH": str(self._file)}

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """verl's step, counted from 1, and the values of each record since the last call."""
        for record in self._lines():
            values = {
                self._names.get(name, f"verl/{name}"): float("nan") if value is None else float(value)
                for name, value in record["data"].items()
                if _is_number(value) or (value is None and name in self._names)  # verl writes NaN and infinity as null
            }
            rate, self._rate = self._rate, values.get(RATE, self._rate)
            yield int(record["step"]), {**values, RATE: rate}

    def _lines(self) -> Iterator[Mapping[str, Any]]:
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole + newline)
        yield from map(json.loads, whole.splitlines())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
