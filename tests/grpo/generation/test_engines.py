"""Engines under the trainer: who samples, with which weights, and what happens when an update is missed."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from grpo.config import rl
from grpo.errors import TrainingStopped
from grpo.generation.engines import CopiedWeights, SharedWeights
from grpo.model.packed import products
from grpo.rl.trainer import Trainer
from grpo.train import read_job
from tests.grpo.rl.test_resume import untimed
from tests.support.job_runner import RL, kill_at, metrics, result, run, run_here, same, steps, weights, write_job

pytestmark = pytest.mark.system

AHEAD = {**RL, "minibatches": 1, "steps": 12, "rollouts_ahead": 1}


@pytest.fixture(scope="module")
def ahead(rl_fields, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ahead")
    run(write_job(folder, "rl", **{**rl_fields, "settings": AHEAD}))
    return folder


def test_a_rollout_ahead_is_one_update_old_and_corrected(ahead):
    records = metrics(ahead)
    assert [r["sampler_age"] for r in records] == [0] + [1] * 11
    assert "logprob_mismatch" in records[0]  # the first is sampled by the policy itself
    assert all(0 < r["sampler_difference"] <= r["sampler_difference_max"] for r in records[1:])
    assert all("logprob_mismatch" not in r for r in records[1:])  # the policy moved: that is no fault of the sampler
    assert all(r["ratio_max"] == pytest.approx(1, abs=1e-5) for r in records)  # one update: the clip sees the policy
    assert result(ahead)["steps_completed"] == 12


def test_with_two_minibatches_the_second_update_is_two_updates_from_its_sampler(rl_fields, tmp_path):
    settings = {**AHEAD, "minibatches": 2, "steps": 8}
    run_here(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings}))
    records = metrics(tmp_path)
    assert [r["sampler_age"] for r in records] == [0, 0, 2, 2, 2, 2, 2, 2]
    assert [r["ratio_max"] == pytest.approx(1, abs=1e-4) for r in records] == [True, False] * 4


def test_killed_with_a_rollout_in_hand_it_ends_where_an_undisturbed_run_does(ahead, rl_fields, tmp_path):
    job = write_job(tmp_path, "rl", **{**rl_fields, "settings": {**AHEAD, "save_every": 2}})
    kill_at(job, 5)
    run(job)
    assert steps(tmp_path) == list(range(1, 13))
    assert untimed(tmp_path) == untimed(ahead)
    assert same(weights(tmp_path), weights(ahead))


def test_a_missed_update_stops_the_run(rl_fields, tmp_path, monkeypatch):
    update = CopiedWeights.update

    def skips_the_third(self, new, version):
        if version != 2:
            update(self, new, version)

    monkeypatch.setattr(CopiedWeights, "update", skips_the_third)
    job = write_job(tmp_path, "rl", **{**rl_fields, "settings": AHEAD})
    with pytest.raises(
        TrainingStopped, match="^the sampler holds version 1 of the weights and the policy is at version 2"
    ):
        run_here(job)
    assert steps(tmp_path) == [1, 2]


def test_part_of_the_weights_is_no_update(rl_fields, tmp_path):
    trainer = Trainer(read_job(write_job(tmp_path, "rl", **{**rl_fields, "settings": AHEAD})))
    try:
        engine = trainer.collect.prefetcher.engine
        tensors = [(name, torch.zeros_like(tensor)) for name, tensor in trainer.models.sampler_weights()]
        with pytest.raises(TrainingStopped, match="version 5 of the weights lacks model.norm.weight"):
            engine.update([pair for pair in tensors if pair[0] != "model.norm.weight"], 5)
        assert engine.version() == -1
        engine.update(tensors, 6)
        assert engine.version() == 6
    finally:
        trainer.collect.close()
        trainer.scorer.close()


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["all weights", "adapters merged"])
def test_a_copy_samples_what_the_policy_itself_does(lora, rl_fields, tmp_path):
    before = products._threads_beside
    settings = {**AHEAD, "lora": lora, "reference_refresh_steps": None}
    trainer = Trainer(read_job(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings})))
    try:
        for name, parameter in trainer.models.policy.named_parameters():
            if lora is None or ".lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        copied = trainer.collect.prefetcher.engine
        assert isinstance(copied, CopiedWeights) and products._threads_beside == before + 1
        copied.update(trainer.models.sampler_weights(), 1)
        asked = [[5, 6, 7], [8, 9]], 3, trainer.settings.sampling, [1, 2]
        own = dict(SharedWeights(trainer.models, trainer.tokenizer.eos_token_id).sample(*asked))
        for number, completions in copied.sample(*asked):
            assert [c.tokens for c in completions] == [c.tokens for c in own[number]]
            for a, b in zip(completions, own[number], strict=True):
                assert all(math.isclose(x, y, abs_tol=1e-4) for x, y in zip(a.logprobs, b.logprobs, strict=True))
    finally:
        trainer.collect.close()
        trainer.scorer.close()
    assert products._threads_beside == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "ppo"}, "rollouts_ahead is for grpo and online_rft; method is 'ppo'"),
        ({"dynamic_sampling_rounds": 1}, "set rollouts_ahead to 0"),
        ({"engine": {"kind": "local"}}, "take kind 'server'"),
    ],
)
def test_what_cannot_be_sampled_ahead(fields, message):
    with pytest.raises(ValidationError, match=message):
        rl.RL.model_validate({**AHEAD, **fields})
