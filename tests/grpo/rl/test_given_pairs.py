"""DPO on pairs from a file: the first loss, the reference, and what the policy learns."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo.data.conversations import CONVERSATION, to_columns
from grpo.errors import InputError
from tests.support.job_runner import RL, metrics, run_here, user, write_job
from tests.support.pair_jobs import pairs_measured
from tests.support.parallel_jobs import ALONE, Team

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


def test_each_process_measures_its_share(rl_fields: dict, tmp_path: Path) -> None:
    rows = [
        {"messages": user(f"What is {a}?" * 25), "chosen": f"<answer>{a}</answer>", "rejected": "no" * (a + 1)}
        for a in range(3)
    ]
    path = job(tmp_path, rl_fields, rows)
    fields = json.loads(path.read_text())
    # Three pairs a step, of more than 128 tokens each: two do not fit in one call, which takes four micro-batches.
    fields["settings"] |= {"prompts_per_step": 3, "group_size": 2, "micro_batch_tokens": 64}
    path.write_text(json.dumps(fields))
    alone = pairs_measured(ALONE, path)
    assert alone["measured"] == [2, 2, 2]
    team = Team(2)
    try:
        found = team(pairs_measured, path)
    finally:
        team.dismiss()
    # The first has pairs 0 and 2, the second pair 1, and then a filler: calls of sharded models are equally many.
    assert [process["measured"] for process in found] == [[2, 2], [2, 1]]
    for process in found:
        for ours, expected in zip(process["logprobs"], alone["logprobs"], strict=True):
            assert ours == pytest.approx(expected, abs=1e-5)


def test_no_pairs_are_said(rl_fields: dict, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pairs.parquet: no pairs"):
        run_here(job(tmp_path, rl_fields, []))
