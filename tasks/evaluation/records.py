"""Files of an evaluation: the closing table, samples, and scores by problem."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tasks.evaluation.metrics import Scores

TABLE, SCORES, SAMPLES = "table.json", "scores.json", "samples"


def write_scores(folder: Path, scores: Mapping[str, Scores]) -> None:
    """Writes checkpoint -> metric -> problem -> value."""
    (folder / SCORES).write_text(json.dumps(scores, indent=1))


def read_scores(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Checkpoint -> metric -> problem -> value; empty for an evaluation of an earlier version."""
    path = folder / SCORES
    return json.loads(path.read_text()) if path.is_file() else {}
