"""The prompts of an RL job as verl reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import Dataset

PROBLEM, PROMPT = "problem_id", "prompt"
"""Columns: the id of a problem, and the tokens of its prompt."""


def write_prompts(path: Path, problems: Sequence[str], prompts: Sequence[Sequence[int]]) -> None:
    """Writes the prompts of all rollouts in the order of their use, a row each."""
    tokens = pa.array(prompts, pa.list_(pa.int32()))
    pq.write_table(pa.table({PROBLEM: pa.array(problems, pa.string()), PROMPT: tokens}), path)


class Prompts(Dataset[dict[str, Any]]):
    """The rows of that file, in their order."""

    def __init__(self, data_files: str | Sequence[str], **_: Any):
        (path,) = [data_files] if isinstance(data_files, str) else data_files
        self._tokens = pq.read_table(path, columns=[PROMPT])[PROMPT]

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, row: int) -> dict[str, Any]:
        # verl asks for raw_prompt, which is messages elsewhere. As text, it stays one value on its way to `turn.Turn`.
        tokens = " ".join(map(str, self._tokens[row].as_py()))
        return {"index": row, "raw_prompt": tokens, "data_source": "r1flow"}
