"""DPO on pairs from a file: the first loss, the reference, and what the policy learns."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo.data.conversations import CONVERSATION, to_columns
from grpo.errors import InputError
from tests.support.job_runner import RL, metrics, run_here, user, write_job

pytestmark = pytest.mark.system


def job(folder: Path, fields: dict, rows: list) -> Path:
    columns = pa.schema([(name, CONVERSATION) for name in ("prompt", "chosen", "rejected")])
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([to_columns(row) for row in rows], schema=columns), folder / "pairs.parquet")
    settings = {**RL, "method": "dpo", "dpo": {"beta": 0.5, "files": ["given.jsonl"]}, "steps": 8}
    settings |= {"optimizer": {"learning_rate": 1e-3}, "minibatches": 1}
    return write_job(folder, "rl", **{**fields, "settings": settings, "pairs": folder / "pairs.parquet"})


def test_it_starts_at_log_2_and_prefers_what_was_chosen(rl_fields: dict, tmp_path: Path) -> None:
    rows = [
        {
            "messages": user(f"What is {a} + 1?"),
            "chosen": f"<think>add</think><answer>{a + 1}</answer>",
            "rejected": f"<think>guess</think><answer>{a}</answer>",
        }
        for a in range(4)
    ]
    run_here(job(tmp_path, rl_fields, rows))
    losses = [record["loss"] for record in metrics(tmp_path)]
    assert len(losses) == 8
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)  # the policy is the reference: -log sigma(0)
    assert losses[-1] < 0.8 * losses[0]


def test_no_pairs_are_said(rl_fields: dict, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pairs.parquet: no pairs"):
        run_here(job(tmp_path, rl_fields, []))
