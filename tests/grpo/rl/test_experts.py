"""GRPO of a mixture of experts: routers frozen, balanced and replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.tiny_models import build
from grpo.config.rl import RL as Settings
from grpo.model.loading import load_tokenizer
from tests.grpo.rl.test_other_architectures import REWARD
from tests.support.job_runner import CPU, RL, metrics, run_here, weights, write_job

STEPS = 2


def test_the_default_is_not_recorded() -> None:
    assert "experts" not in Settings(**RL).model_dump()  # keys of earlier versions stay


@pytest.mark.parametrize("change", [{"hardware": CPU}, {"method": "ppo"}, {"rollouts_ahead": 1}])
def test_replay_needs_the_librarys_sampler(change: dict[str, Any]) -> None:
    fields = {**RL, "hardware": {**CPU, "sampler": "own"}, "experts": {"replay": True}}
    assert Settings(**fields).experts.replay
    with pytest.raises(ValueError, match=r"experts\.replay takes the experts that this library's sampler chose"):
        Settings(**{**fields, **change})


@pytest.mark.system
def test_a_job_with_frozen_balanced_and_replayed_experts(
    model_folder: str, rl_fields: dict[str, Any], tmp_path: Path
) -> None:
    start = tmp_path / "start" / "out"
    tokenizer = load_tokenizer(model_folder)
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    build("qwen3_moe", start, vocab_size=len(tokenizer), **ends)
    tokenizer.save_pretrained(start)

    def trained(name: str, **experts: Any) -> Path:
        hardware = {**CPU, "sampler": "own"}
        settings = {
            **RL,
            "steps": STEPS,
            "minibatches": 1,
            "rewards": {REWARD: 1},
            "hardware": hardware,
            "experts": experts,
        }
        run_here(write_job(tmp_path / name, "rl", **{**rl_fields, "model": str(start), "settings": settings}))
        return tmp_path / name

    plain = trained("plain")
    every = trained("every", routers="frozen", balance_coef=0.1, replay=True)
    replayed = trained("replayed", replay=True)
    before, after = weights(tmp_path / "start"), weights(every)
    routers = [name for name in before if name.endswith("gate.weight")]
    assert len(routers) == 4
    assert all(torch.equal(before[name], after[name]) for name in routers)
    assert not all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert not all(torch.equal(before[name], weight) for name, weight in weights(plain).items() if name in routers)
    for record in metrics(every):
        assert 0.8 < record["expert_balance"] < 4  # of 4 experts
        assert record["logprob_mismatch"] < 1e-4
    # In float32 the sampler and the trainer choose the same experts, so replay changes nothing but rounding.
    for one, other in zip(metrics(plain), metrics(replayed), strict=True):
        assert "expert_balance" not in one
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3, abs=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
