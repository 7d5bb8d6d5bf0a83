"""verl's log of a run, under this library's names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo.processes.metrics_log import Metrics

NAMES = {"train/loss": "loss", "train/grad_norm": "grad_norm"}
"""verl's name -> ours. Others keep theirs, below `verl/`."""
RATE = "train/lr"
"""verl logs with each step the learning rate of the next one."""


class Records:
    """Appends to metrics.jsonl what verl adds to the file of its logger. verl empties that file when it starts, so each
    attempt has one of its own."""

    def __init__(self, file: Path, metrics: Metrics, planned: int, first_rate: float):
        self._file, self._metrics, self._planned, self._rate = file, metrics, planned, first_rate
        self._offset = 0

    def hand_on(self) -> None:
        """Appends the new records."""
        for record in self._new():
            values, rate = dict(record["data"]), self._rate
            self._rate = float(values.pop(RATE, rate))
            named = {NAMES.get(name, f"verl/{name}"): value for name, value in values.items() if _is_number(value)}
            self._metrics.log(int(record["step"]), self._planned, **named, learning_rate=rate)

    def _new(self) -> Iterator[Mapping[str, Any]]:
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole + newline)
        yield from map(json.loads, whole.splitlines())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
