"""Rows that reward models are trained on: pairs and labels, some of which are held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.data.conversations import to_columns
from grpo.data.records import Message
from tasks.problems.normal_form import normalise
from tasks.sft_data.statistics import prompt_text


def pair_row(
    messages: list[Message], chosen: str, rejected: str, strength: float, source: str, held_out_share: float
) -> dict[str, Any]:
    """The row of a pair. `strength`: how much better, at least 0; a judge's mean verdict is at most 2."""
    return {
        "messages": messages,
        "chosen": chosen,
        "rejected": rejected,
        "strength": strength,
        "source": source,
        "held_out": held_out(messages, held_out_share),
    }


def label_row(messages: list[Message], response: str, safe: bool, source: str, held_out_share: float) -> dict[str, Any]:
    """The row of a response with its safety label."""
    return {
        "messages": messages,
        "response": response,
        "label": int(safe),
        "source": source,
        "held_out": held_out(messages, held_out_share),
    }


def held_out(messages: Sequence[Message], share: float) -> bool:
    """Whether a prompt is held out. Its text decides, so no prompt is on both sides, whatever its source."""
    text = normalise(prompt_text(messages))
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32 < share


def drop_duplicates(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drops rows that repeat an earlier judgment on the same responses."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        identity = [row["messages"], *(row.get(name) for name in ("chosen", "rejected", "response", "label"))]
        first.setdefault(json.dumps(identity), row)
    return list(first.values())


def write_preferences(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows of pairs or labels as parquet, with the columns of `grpo.data.conversations`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([to_columns(row) for row in rows]), path)
