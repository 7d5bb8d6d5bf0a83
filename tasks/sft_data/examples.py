"""Supervised examples: prompts with the completions to learn, as parquet shards that grpo/ trains on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.data.conversations import CONVERSATION, to_columns
from grpo.data.records import Problem

SHARD = 4096
_SCHEMA = pa.schema(
    [
        ("problem_id", pa.string()),
        ("domain", pa.string()),
        ("language", pa.string()),
        ("prompt", CONVERSATION),
        ("completion", CONVERSATION),
    ]
)


def example(problem: Problem, completion: str) -> dict[str, Any]:
    """A row of SFT data."""
    return {
        "problem_id": problem.id,
        "domain": problem.domain,
        "language": problem.language,
        "messages": problem.messages,
        "completion": completion,
    }


def write_examples(folder: Path, examples: Sequence[dict[str, Any]]) -> None:
    """Writes shards part-NNNNN.parquet in `folder`, which is created, in the columns of `grpo.data.conversations`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, max(1, len(examples)), SHARD)):
        rows = [to_columns(row) for row in examples[start : start + SHARD]]
        table = pa.Table.from_pylist(rows, schema=_SCHEMA)
        pq.write_table(table, folder / f"part-{number:05d}.parquet")
