"""Files of an evaluation: the closing table, samples, and scores per problem."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.evaluation.metrics import Scores

TABLE, SCORES, SAMPLES, SETS = "table.json", "scores.json", "samples", "sets"
INTERVAL = "_ci95"


def samples_of_set(checkpoint: str, name: str) -> str:
    """Name of the folder in `SAMPLES` with a checkpoint's samples of a test set. Test set names contain no dot."""
    return f"{checkpoint}.{name}"


def in_set(name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of a test set, named as in a row of the closing table: "gsm8k/pass@1"."""
    return {f"{name}/{metric}": value for metric, value in metrics.items()}


def by_set(table: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Test set -> its own closing table: checkpoint -> metric -> value."""
    sets: dict[str, dict[str, dict[str, Any]]] = {}
    for checkpoint, row in table.items():
        for key, value in row.items():
            name, slash, metric = key.partition("/")
            if slash:
                sets.setdefault(name, {}).setdefault(checkpoint, {})[metric] = value
    return sets


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row for a tracker: its metrics, and for test sets also the interval bounds as _low and _high."""
    found = {metric: value for metric, value in row.items() if isinstance(value, float)}
    for metric, value in row.items():
        if "/" in metric and metric.endswith(INTERVAL):
            found |= dict(
                zip((f"{metric.removesuffix(INTERVAL)}_{end}" for end in ("low", "high")), value, strict=True)
            )
    return found


def write_scores(folder: Path, scores: Mapping[str, Scores]) -> None:
    """Writes checkpoint -> metric -> problem -> value."""
    (folder / SCORES).write_text(json.dumps(scores, indent=1))


def read_scores(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Reads checkpoint -> metric -> problem -> value. Empty for an evaluation by an earlier version."""
    path = folder / SCORES
    return json.loads(path.read_text()) if path.is_file() else {}
