"""bfloat16 arithmetic on float32 weights, in every kind of training: whole jobs on a tiny Llama."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from grpo.config.common import Hardware
from tests.support.job_runner import (
    PRETRAIN,
    RL,
    SFT,
    kill_at,
    metrics,
    result,
    run,
    run_here,
    same,
    steps,
    user,
    weights,
    write_job,
)

pytestmark = pytest.mark.system

PURE = {"device": "cpu", "dtype": "bfloat16"}
MIXED = {**PURE, "mixed_precision": True}


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """Share of the weights that are not what they were, as far as the type that they were saved in shows."""
    changed = sum((before[name].to(t.dtype) != t).sum().item() for name, t in after.items())
    return changed / sum(t.numel() for t in after.values())


def saved_types(folder: Path) -> set[str]:
    """Of the weights, and what config.json says."""
    types = {str(t.dtype) for t in load_file(folder / "out" / "model.safetensors").values()}
    return types | {"torch." + json.loads((folder / "out" / "config.json").read_text())["dtype"]}


def test_float32_arithmetic_is_not_mixed():
    with pytest.raises(ValidationError, match="set dtype to 'bfloat16' too"):
        Hardware(mixed_precision=True)


@pytest.mark.slow
def test_it_learns_as_float32_does(sft_fields, tmp_path):
    last = {}
    for name, hardware in (("float32", {"device": "cpu"}), ("mixed", MIXED)):
        settings = {**SFT, "max_steps": 20, "hardware": hardware}
        run(write_job(tmp_path / name, "sft", **{**sft_fields, "settings": settings}))
        losses = [record["loss"] for record in metrics(tmp_path / name)]
        assert losses[-1] < 0.5 * losses[0]
        last[name] = losses[-1]
    assert last["mixed"] == pytest.approx(last["float32"], rel=0.05)


@pytest.mark.slow
def test_pretraining_and_the_kill_of_it(base, tmp_path):
    settings = {**PRETRAIN, "hardware": MIXED, "save_every": 7}
    whole, killed = (
        write_job(tmp_path / name, "pretrain", settings=settings, corpus=base / "corpus.txt")
        for name in ("whole", "killed")
    )
    run(whole)
    kill_at(killed, 10)
    run(killed)
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    assert saved_types(tmp_path / "whole") == {"torch.float32"}
    pure = write_job(
        tmp_path / "pure", "pretrain", settings={**settings, "hardware": PURE, "steps": 2}, corpus=base / "corpus.txt"
    )
    run(pure)
    assert saved_types(tmp_path / "pure") == {"torch.bfloat16"}


def test_a_reward_model(sft, tmp_path):
    pairs = [
        {"messages": user(f"Say {i}"), "chosen": f"yes {i % 7}", "rejected": f"no {i % 5}", "held_out": i % 4 == 0}
        for i in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(pairs), tmp_path / "data.parquet")
    settings = {**SFT, "optimizer": {"learning_rate": 0.003, "warmup_steps": 4}, "hardware": MIXED}
    fields = {"settings": settings, "model": sft / "out", "data": tmp_path / "data.parquet", "loss": "pairs"}
    run(write_job(tmp_path, "reward_model", **fields))
    assert result(tmp_path)["metrics"]["held_out_accuracy"] == 1.0
    assert saved_types(tmp_path) == {"torch.float32"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reference_mixing": 0.5},
        {"method": "ppo"},
        {"lora": {"rank": 4}, "reference_refresh_steps": None},
    ],
    ids=["grpo", "moving average", "ppo", "lora"],
)
def test_rl_samples_measures_and_learns(rl_fields, tmp_path, changes):
    settings = {**RL, "steps": 6, "hardware": MIXED, **changes}
    run_here(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings}))
    records = metrics(tmp_path)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    # Sampler and trainer compute in the same type; how products are packed differs.
    assert max(record.get("logprob_mismatch", 0) for record in records) < 0.2
    # The reference is the policy itself before the first update.
    assert abs(records[0].get("kl", 0)) < 0.01
    start = load_file(Path(rl_fields["model"]) / "model.safetensors")
    assert moved(start, weights(tmp_path)) > 0.5
    assert saved_types(tmp_path) == {"torch.float32"}


def test_rl_at_a_learning_rate_of_r1s_size(rl_fields, tmp_path):
    start = load_file(Path(rl_fields["model"]) / "model.safetensors")
    settings = {**RL, "steps": 4, "optimizer": {"learning_rate": 3e-6}, "hardware": MIXED}
    run_here(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings}))
    assert moved(start, weights(tmp_path)) > 0.8


@pytest.mark.slow
def test_killed_rl_goes_on_bit_by_bit(rl_fields, tmp_path):
    settings = {**RL, "steps": 14, "save_every": 4, "hardware": MIXED}
    whole, killed = (
        write_job(tmp_path / name, "rl", **{**rl_fields, "settings": settings}) for name in ("whole", "killed")
    )
    run(whole)
    kill_at(killed, 6)
    run(killed)
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))


def test_a_value_head_on_the_policys_states_is_refused(rl_fields, tmp_path):
    settings = {**RL, "method": "ppo", "ppo": {"value": "head"}, "hardware": MIXED}
    said = run(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings}), expected=2).stderr
    assert said.splitlines()[-1] == (
        "error: ppo.value 'head' works in one process and without mixed_precision; take 'model'"
    )
