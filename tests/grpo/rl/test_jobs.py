"""Reinforcement learning as a job: every method, killed and resumed, with everything that a recipe can switch on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo.rl.trainer import Trainer
from grpo.train import read_job
from tests.support.job_runner import (
    COMMAND,
    ENVIRONMENT,
    RL,
    ROOT,
    kill_at,
    metrics,
    result,
    run,
    run_here,
    same,
    steps,
    wait_until,
    weights,
    write_job,
)

pytestmark = pytest.mark.system


def completions(folder):
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def test_grpo(rl, sft):
    written = result(rl)
    assert written["steps_completed"] == written["steps_planned"] == 40
    records = metrics(rl)
    assert steps(rl) == list(range(1, 41))
    assert any(0 < r["zero_variance_share"] < 1 for r in records)
    assert all(0 <= r["reward_accuracy"] <= 1 and r["reward_format"] > 0.4 for r in records)
    # Sampler and trainer agree; only a rollout's first minibatch can tell.
    assert [r["step"] for r in records if "logprob_mismatch" in r] == list(range(1, 41, 2))
    assert max(r.get("logprob_mismatch", 0) for r in records) < 1e-4
    assert records[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert max(r["kl"] for r in records) > 1e-4
    AutoModelForCausalLM.from_pretrained(rl / "out")
    assert not same(weights(rl), weights(sft))
    shown = completions(rl)
    assert {sample["step"] for sample in shown} == {0, 8, 18, 28, 38} and {sample["of"] for sample in shown} == {40}
    assert shown[0].keys() >= {"problem", "gold", "completion", "reward", "advantage", "accuracy"}


def test_completions_are_in_their_own_file_alone(rl):
    """Of a long run they are many, and a checkpoint would have all of them."""
    checkpoints = [*(rl / "state").glob("step-*/plain.pt")]
    assert checkpoints and "samples" not in result(rl)
    for path in checkpoints:
        assert "samples" not in torch.load(path, weights_only=False)


def test_steps_without_reward_variance_teach_nothing(rl_fields, sft, tmp_path):
    # So cold that a group's completions are the same.
    settings = {**RL, "steps": 4, "kl_coef": 0, "sampling": {**RL["sampling"], "temperature": 0.001}}
    run(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings}))
    records = metrics(tmp_path)
    assert [r["grad_norm"] for r in records] == [0] * 4 and all(r["zero_variance_share"] == 1 for r in records)
    assert same(weights(tmp_path), weights(sft))


def test_a_killed_grpo_job_ends_where_an_undisturbed_one_does(rl, rl_fields, tmp_path):
    job = write_job(tmp_path, "rl", **rl_fields)
    kill_at(job, 15)
    run(job)
    assert steps(tmp_path) == list(range(1, 41))
    assert [r["reward"] for r in metrics(tmp_path)] == [r["reward"] for r in metrics(rl)]
    assert same(weights(tmp_path), weights(rl))
    assert result(tmp_path) == result(rl)
    assert completions(tmp_path) == completions(rl)


METHODS = {
    "online_rft": {"method": "online_rft"},
    "rft": {"method": "rft"},
    "dpo": {"method": "dpo"},
    "sft": {"method": "sft"},
    "ppo": {"method": "ppo", "ppo": {"gae_lambda": 0.95}},
    "ppo with a head": {"method": "ppo", "ppo": {"value": "head"}},
    "process supervision": {"supervision": "process", "step_reward": "tests.support.user_rewards:first_is_best"},
    "gspo": {"objective": "gspo", "advantage": "rloo", "std": "sample", "kl_estimator": "k2"},
    "dapo": {
        "objective": "dapo",
        "kl_coef": 0,
        "dynamic_sampling_rounds": 3,
        "mask_truncated": True,
        "rewards": {"accuracy": 1, "overlong": {"weight": 0.5, "cache_tokens": 3}},
    },
    "own reward": {"rewards": {"accuracy": 1, "tests.support.user_rewards:brief": {"weight": 1, "below": 8}}},
    "lora": {"lora": {"rank": 4}, "reference_refresh_steps": None},
}
MEASURED = {
    "dpo": {"pair_accuracy", "pair_margin"},
    "ppo": {"value_loss", "value_grad_norm", "kl"},
    "ppo with a head": {"value_loss", "kl"},
    "own reward": {"reward_tests.support.user_rewards:brief"},
    "dapo": {"reward_overlong", "replaced_groups"},
}


@pytest.mark.parametrize("name", METHODS)
def test_one_field_switches_the_method(name, rl_fields, base, sft, tmp_path):
    settings = {**RL, "steps": 6, **METHODS[name]}
    run_here(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings}, demonstrations=base / "sft.parquet"))
    records = metrics(tmp_path)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert records[-1].keys() >= MEASURED.get(name, set()) | {"loss", "grad_norm"}
    assert ("reward" in records[0]) == (name != "sft")
    assert all(0 < r["grad_norm"] < 1000 for r in records[-1:])
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not same(weights(tmp_path), weights(sft))
    assert weights(tmp_path).keys() == weights(sft).keys()  # with LoRA too: adapters are merged


def test_dynamic_sampling_replaces_groups_without_variance(rl_fields, tmp_path):
    shares = {}
    for rounds in (0, 8):
        settings = {**RL, "steps": 8, "rewards": {"accuracy": 1}, "dynamic_sampling_rounds": rounds}
        folder = tmp_path / str(rounds)
        run_here(write_job(folder, "rl", **{**rl_fields, "settings": settings}))
        records = metrics(folder)
        shares[rounds] = [r["zero_variance_share"] for r in records]
        assert any(r["replaced_groups"] for r in records) == bool(rounds)
        assert ["kept_reward_accuracy" in r for r in records] == [bool(rounds)] * 8
    assert sum(shares[8]) < sum(shares[0])
    # Of 4 problems in a rollout and those that replaced some, each with 4 completions that are right or wrong.
    asked = [16 + 4 * r["replaced_groups"] for r in records]
    right = [r["reward"] * count for r, count in zip(records, asked, strict=True)]
    assert right == pytest.approx([round(count) for count in right], abs=1e-4)
    assert any(r["kept_reward"] != r["reward"] for r in records)


def test_problems_that_dynamic_sampling_replaced_rest_too(rl_fields, tmp_path):
    settings = {**RL, "rewards": {"accuracy": 1}, "dynamic_sampling_rounds": 8, "curriculum": {"rest": 1}}
    trainer = Trainer(read_job(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings})))
    try:
        first = trainer.collect(step=0, minibatches=2, attempt=1)
    finally:
        trainer.scorer.close()
    left_flat = round(4 * first.metrics["zero_variance_share"])  # of 4 problems in a rollout
    assert first.metrics["replaced_groups"] > 0
    assert first.max_new_tokens == RL["sampling"]["max_new_tokens"]
    assert len(trainer.orders["reasoning"].resting) > left_flat


def test_a_longer_completion_is_allowed_from_a_step_on(rl_fields, tmp_path):
    # With an end mark that the policy must not reach: 3 tokens are too few for any answer, 10 are enough for some.
    settings = {**RL, "steps": 4, "minibatches": 1, "max_new_tokens_from": {"0": 3, "2": 10}}
    run_here(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings}))
    lengths = [r["completion_tokens"] for r in metrics(tmp_path)]
    assert lengths[:2] == [3, 3]
    assert min(lengths[2:]) > 3


def test_a_reward_that_always_fails_stops_the_run_and_says_why(rl_fields, tmp_path):
    settings = {**RL, "rewards": {"tests.support.user_rewards:broken": 1}}
    done = run(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings}), expected=1)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: training stopped: rewards failed for 16 of 16 completions (16 error)")
    assert "ZeroDivisionError: the user's mistake" in last
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "result.json").exists()


def test_failures_below_the_share_are_counted_and_training_goes_on(rl_fields, tmp_path):
    settings = {**RL, "steps": 2, "rewards": {"format": 1, "tests.support.user_rewards:broken": 1}}
    settings["scoring"] = {"max_failure_share": 1.0}
    run_here(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings}))
    # Both minibatches of a rollout of 16 completions show the rollout's count.
    assert [r["reward_failures_error"] for r in metrics(tmp_path)] == [16, 16]


def test_step_rewards_that_fail_are_counted_and_the_outcome_stands_alone(rl_fields, tmp_path):
    settings = {**RL, "steps": 2, "supervision": "process", "step_reward": "tests.support.user_rewards:broken"}
    settings["scoring"] = {"max_failure_share": 1.0}
    run_here(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings}))
    records = metrics(tmp_path)
    # At most one a completion, of 16 in the rollout; those without a think block have no steps.
    assert all(8 <= r["reward_failures_error"] <= 16 for r in records)
    assert any(r["grad_norm"] > 0 for r in records)


@pytest.mark.parametrize("ahead", [{}, {"rollouts_ahead": 1, "minibatches": 4}], ids=["", "ahead"])
def test_weights_that_are_no_numbers_roll_back_and_then_stop(ahead, rl_fields, tmp_path):
    settings = {**RL, "save_every": 1, "optimizer": {"learning_rate": 0.9, "max_grad_norm": 1e30}}
    # A larger coefficient would make the first gradient infinite where the KL differs from 0 by rounding: on some CPUs.
    settings |= {"clip_eps_high": 1e30, "kl_coef": 1e3, "health": {"max_roll_backs": 1}, **ahead}
    done = run(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings}), expected=1)
    notices = [line.removeprefix("notice: ") for line in done.stderr.splitlines() if line.startswith("notice: ")]
    assert any(line.startswith("not_finite: step ") for line in notices)  # the launcher forwards them
    assert any(line.startswith("rolled back to step") for line in notices)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: training stopped: not_finite: step ")
    assert last.endswith("(rolled back 1 times already)")


def test_general_prompts_join_in_the_last_steps(sft, problems, reward_models, tmp_path):
    settings = {
        **RL,
        "steps": 4,
        "minibatches": 1,
        "kl_coef": 0,
        "general_last_steps": 2,
        "general_share": 0.5,
        "rewards": {"accuracy": 1, "helpful": 0.1, "safe": 1, "language": 1},
    }
    fields = {"settings": settings, "model": sft / "out", "problems": [problems]}
    models = {"helpful_model": reward_models["pairs"] / "out", "safe_model": reward_models["points"] / "out"}
    run(write_job(tmp_path, "rl", **fields, **models))
    records = metrics(tmp_path)
    for name in ("reward_helpful", "reward_safe"):
        assert [name in r for r in records] == [False, False, True, True]
    assert all("reward_accuracy" in r and "kl" not in r for r in records)
    for name in ("reasoning_reward", "general_reward", "general_reward_safe", "reasoning_reward_language"):
        assert [name in r for r in records] == [False, False, True, True]


def test_process_supervision_leaves_general_prompts_alone(rl_fields, tmp_path):
    rewards = {"accuracy": 1, "tests.support.user_rewards:letters": 1}
    settings = {**RL, "steps": 4, "minibatches": 1, "rewards": rewards, "supervision": "process"}
    settings |= {"step_reward": "reduction", "general_last_steps": 2, "general_share": 0.5}
    run_here(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings}))
    records = metrics(tmp_path)
    assert ["general_reward" in r for r in records] == [False, False, True, True]
    assert all(r["reward_failures"] == 0 and r["grad_norm"] > 0 for r in records)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_trainer_dies_with_its_parent(rl_fields, tmp_path):
    job = write_job(tmp_path, "rl", **{**rl_fields, "settings": {**RL, "steps": 100_000}})
    script = (
        "import os, subprocess, sys\n"
        "os.environ['R1FLOW_PARENT_PID'] = str(os.getpid())\n"
        "child = subprocess.Popen(sys.argv[1:])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *COMMAND, job], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    trainer = int(parent.stdout.readline())
    try:
        wait_until(lambda: metrics(tmp_path))
        assert alive(trainer)
    finally:
        parent.kill()
        parent.communicate()
    try:
        wait_until(lambda: not alive(trainer), timeout=60)
    finally:
        if alive(trainer):
            os.kill(trainer, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_inner_epochs_keep_samples_as_often(rl_fields, tmp_path):
    """Both rollouts, of four updates each, keep samples: the first one always, the second one for step 8."""
    settings = {**RL, "steps": 8, "minibatches": 2, "inner_epochs": 2, "samples_every": 4}
    run_here(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings}))
    assert sorted({sample["step"] for sample in completions(tmp_path)}) == [0, 4]
