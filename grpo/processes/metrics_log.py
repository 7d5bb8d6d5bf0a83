"""The files to which a job reports: metrics line by line, and a result at the end."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMPLETIONS = "completions.jsonl"
"""The file next to the metrics, in the same form, with sampled completions for people to read."""


class Metrics:
    """Appends one JSON object per step to metrics.jsonl. A resumed job first drops the lines after its checkpoint, so
    that each step appears once."""

    def __init__(self, path: Path, resume_step: int = 0):
        self.path = path
        if path.exists():
            lines = path.read_bytes().decode(errors="replace").split("\n")
            replace_text(path, "".join(f"{line}\n" for line in lines if _step(line) <= resume_step))
        self.file = path.open("a")

    def log(self, step: int, of: int, **values: Any) -> None:
        """Writes the metrics of `step`, counted from 1, out of `of` planned steps."""
        self.file.write(json.dumps({"step": step, "of": of, **values}) + "\n")
        self.file.flush()


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")  # an incomplete line from a killed process, or one damaged on disk


def closing_means(
    metrics: Path, selected: Callable[[str], bool], last: int = 10, counts: Callable[[str], bool] | None = None
) -> dict[str, float]:
    """Means over the `last` steps of the metrics whose names are `selected`, because single steps are noisy. A metric
    need not be in every step: it was not measured in those without it, or it is one of the `counts` and 0 there. Values
    that are not finite are of steps that were skipped, and count only if there are no others."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()][-last:]
    if counts is not None:
        zeros = dict.fromkeys({name for record in records for name in record if counts(name)}, 0)
        records = [zeros | record for record in records]
    columns: dict[str, list[float]] = {}
    for name, value in (item for record in records for item in record.items() if selected(item[0])):
        columns.setdefault(name, []).append(value)
    finite = {name: [*filter(math.isfinite, values)] or values for name, values in columns.items()}
    return {name: sum(values) / len(values) for name, values in finite.items()}


def write_result(path: Path, steps_completed: int, steps_planned: int, **values: Any) -> None:
    """Writes result.json, the job's own report of what it did; the exit code alone is not enough."""
    replace_text(path, json.dumps({"steps_completed": steps_completed, "steps_planned": steps_planned, **values}))


def replace_text(path: Path, text: str, *, private: bool = False) -> None:
    """Writes a file atomically: a reader sees either the old text or the new one. A private one is the user's alone."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
