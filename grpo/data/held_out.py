"""Held-out preferences with a reward model's scores: a parquet file in the model's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.data.conversations import from_columns, to_columns

HELD_OUT = "held_out.parquet"

ScoredRow = dict[str, Any]
"""A row of preference data with `chosen_score` and `rejected_score`, or with `score`."""


def write_held_out(folder: Path, rows: Sequence[ScoredRow]) -> None:
    """Writes held-out rows with their scores beside a reward model."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([to_columns(row) for row in rows]), folder / HELD_OUT)


def read_held_out(folder: Path) -> list[ScoredRow]:
    """Rows that `write_held_out` wrote; empty if nothing was held out."""
    path = folder / HELD_OUT
    return [from_columns(row) for row in pq.read_table(path).to_pylist()] if path.is_file() else []


def is_correct(row: ScoredRow) -> bool:
    """Whether a pair is ranked correctly, or a labelled response's score is on the correct side of 0."""
    if "label" in row:
        return bool((row["score"] > 0) == (row["label"] > 0.5))
    return bool(row["chosen_score"] > row["rejected_score"])
