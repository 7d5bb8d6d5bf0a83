"""Replay: mixes preferences of earlier rounds into those of this round (DSM, algorithm 1)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from grpo.data.conversations import from_columns
from grpo.errors import InputError
from tasks.preferences.rows import drop_duplicates


def replay(rows: Sequence[dict[str, Any]], history: Sequence[Path], share: float, seed: int) -> list[dict[str, Any]]:
    """Rows of earlier rounds to train on in addition to `rows`, drawn without replacement. They make up `share` (from 0
    to below 1) of all training rows, or less if there are not enough.

    Held-out rows are neither drawn nor counted, so that accuracy is measured on this round's responses. Rows already in
    `rows` are not drawn. Raises InputError if a file of `history` is missing.
    """
    for path in history:
        if not path.is_file():
            raise InputError(
                f"{path}: no such file; reward models of an earlier round keep what they learnt from there"
            )
    earlier = [from_columns(row) for path in history for row in pq.read_table(path).to_pylist()]
    old = [row for row in drop_duplicates([*rows, *earlier])[len(drop_duplicates(rows)) :] if not row["held_out"]]
    new = sum(not row["held_out"] for row in rows)
    count = round(new * share / (1 - share))
    return random.Random(f"replay/{seed}").sample(old, min(count, len(old)))
