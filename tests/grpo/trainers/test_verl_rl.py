"""GRPO by a real verl, on Ray of its own: this library's prompts, rewards, advantages, loss and gradients."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
import torch

from flows.prefect_server import free_port
from grpo.config.jobs import RLJob
from grpo.data.completions import Completion
from grpo.distributed.process_group import Parallel
from grpo.model.loading import load_tokenizer
from grpo.rewards.registry import total
from grpo.rl.batch import Rollout
from grpo.rl.credit import CreditInputs, group_relative
from grpo.rl.method_table import method_of
from grpo.rl.model_set import Models
from grpo.rl.per_token_values import measure
from grpo.rl.update import Update
from grpo.scoring.reward_weights import reward_weights
from grpo.scoring.scorer import Scorer, responses_of
from grpo.train import read_job
from grpo.trainers.verl.rl import _rows
from tests.support import job_runner
from tests.support.job_runner import CPU, RL, kill_at, metrics, result, run, steps, wait_until, weights, write_job
from tests.support.verl_environment import (
    ONE_DEVICE,
    PYTHON,
    RL_OPTIONS,
    SAMPLING_ON_CPU,
    SAMPLING_OPTIONS,
    needs_verl,
)

pytestmark = [pytest.mark.system, needs_verl]

STEPS = 4
REWARDS = {"accuracy": 1, "tests.support.user_rewards:letters": 2}
SETTINGS = RL | {
    "steps": STEPS,
    "minibatches": 1,
    "rewards": REWARDS,
    "kl_coef": 0.1,
    "reference_refresh_steps": 2,
    "save_every": 1,
    "samples_every": 1,
    "sampling": {"max_new_tokens": 8, "temperature": 1.5},
    "optimizer": {"learning_rate": 0.001},
    "hardware": CPU | {"processes": 2, "trainer": {"kind": "verl", "python": PYTHON, "options": RL_OPTIONS}},
}


@pytest.fixture(scope="module", autouse=True)
def verl_on_a_cpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_runner, "ENVIRONMENT", job_runner.ENVIRONMENT | SAMPLING_ON_CPU)
        yield


@pytest.fixture(scope="module")
def fields(base, rl_fields) -> dict:
    """Of a policy that is sure of little, so that no gradient is so small that AdamW makes much of its rounding."""
    return rl_fields | {"model": base / "out", "settings": SETTINGS}


@pytest.fixture(scope="module")
def trained(fields, tmp_path_factory) -> Path:
    """A job, and in sampled.jsonl what its sampler drew."""
    folder = tmp_path_factory.mktemp("verl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(job_runner.ENVIRONMENT, "VERL_SAMPLED", str(folder / "sampled.jsonl"))
        run(write_job(folder, "rl", **fields), timeout=500)
    return folder


class Again:
    """This library's updates on the completions that verl sampled."""

    def __init__(self, folder: Path):
        job = read_job(folder / "job.json")
        assert isinstance(job, RLJob)
        hardware = job.settings.hardware.model_copy(update={"processes": 1, "trainer": None})
        self.settings = job.settings.model_copy(update={"hardware": hardware})
        self.job, self.tokenizer = job, load_tokenizer(job.model)
        self.parallel = Parallel.start(hardware)
        self.models = Models(job.model, self.settings, method_of(self.settings), self.parallel)
        self.update = Update(self.settings, method_of(self.settings), self.models, self.parallel)
        self.rows = _rows(job, self.tokenizer)
        self.sampled = [json.loads(line) for line in (folder / "sampled.jsonl").read_text().splitlines()]
        self.weights = reward_weights(self.settings)
        self.scorer = Scorer({name: {} for name in REWARDS}, self.settings.scoring)

    def step(self, number: int) -> dict[str, float]:
        """Makes update `number`, counted from 0."""
        settings, size = self.settings, self.settings.group_size
        per_step = settings.prompts_per_step * size
        drawn = self.sampled[number * per_step : (number + 1) * per_step]
        chosen = self.rows[number * settings.prompts_per_step : (number + 1) * settings.prompts_per_step]
        groups = [[d for d in drawn if d["prompt"] == row.prompt] for row in chosen]
        assert [len(group) for group in groups] == [size] * len(chosen)  # the prompts are ours, in our order
        drawn = [d for group in groups for d in group]
        rewards = torch.tensor([self._rewards(row.problem, group) for row, group in zip(chosen, groups, strict=True)])
        prompts, tokens = [d["prompt"] for d in drawn], [d["tokens"] for d in drawn]
        with self.models.reference_logprobs(settings.sampling.temperature) as of_reference:
            reference = measure(of_reference, prompts, tokens, settings.micro_batch_tokens, self.parallel)
        lengths = [*map(len, tokens)]
        credit = group_relative(CreditInputs(rewards, [False] * len(tokens), lengths), settings)
        rollout = Rollout(
            prompts=prompts,
            completions=tokens,
            advantages=credit.advantages,
            old_logprobs=None,
            ref_logprobs=reference,
            old_values=None,
            returns=None,
            learnt=[True] * len(tokens),
            units=[[i] for i in range(len(tokens))],
            metrics={},
            sampler_logprobs=[torch.tensor(d["logprobs"]) for d in drawn],
        )
        stats = self.update(rollout, range(len(tokens)), number)
        if (number + 1) % (settings.reference_refresh_steps or STEPS) == 0:
            self.models.refresh_reference()
        return stats | {"reward": rewards.mean().item(), "completion_tokens": sum(lengths) / len(lengths)}

    def _rewards(self, problem, group) -> list[float]:
        completions = [Completion(d["tokens"], d["logprobs"], True) for d in group]
        responses = responses_of(self.tokenizer, problem, group[0]["prompt"], completions, 8)
        return [
            total(breakdown, self.weights) for breakdown in self.scorer.start(problem, responses).finish().breakdowns
        ]


def test_verl_makes_the_updates_of_this_library(trained):
    again = Again(trained)
    try:
        ours = [again.step(number) for number in range(STEPS)]
    finally:
        again.scorer.close()
    theirs = metrics(trained)
    assert steps(trained) == [1, 2, 3, 4]
    for a, b in zip(ours, theirs, strict=True):
        near = 1e-5 if b["step"] == 1 else 1e-3  # rounding grows with the steps, at a rate of 0.001
        assert b["reward"] == pytest.approx(a["reward"], abs=1e-6)
        assert b["completion_tokens"] == a["completion_tokens"]
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=10 * near)
        assert b["loss"] == pytest.approx(a["loss"], rel=near, abs=1e-6)
        assert b["learning_rate"] == a["learning_rate"]
        assert b["grad_norm"] > 0.01
    assert theirs[1]["kl"] > 1e-4 and theirs[0]["kl"] == theirs[2]["kl"] == 0  # the reference is new at step 3
    for name, tensor in weights(trained).items():
        own = dict(again.models.policy.model.named_parameters())[name]
        assert (tensor - own).abs().mean() < 1e-3 * own.abs().mean()


def test_metrics_and_samples_have_this_librarys_names(trained):
    record = metrics(trained)[0]
    names = {"reward", "reward_accuracy", "reward_tests.support.user_rewards:letters", "zero_variance_share", "kl"}
    names |= {"truncated_share", "sampled_entropy", "clipped_low", "sampling_s", "update_s", "tokens_per_s"}
    assert names <= record.keys() and "verl/perf/mfu/actor" in record
    assert all(math.isfinite(record[name]) for name in names)
    written = result(trained)
    assert written["steps_completed"] == written["steps_planned"] == STEPS
    assert written["findings"] == []
    samples = [json.loads(line) for line in (trained / "completions.jsonl").read_text().splitlines()]
    assert len(samples) == STEPS * 8
    assert {"step", "problem", "gold", "completion", "reward", "advantage", "accuracy"} <= samples[0].keys()
    assert written["metrics"]["reward"] == pytest.approx(sum(m["reward"] for m in metrics(trained)) / STEPS)


def test_few_checkpoints_stay_however_often_verl_is_started(trained):
    (folder,) = trained.rglob("checkpoints")
    assert {path.name for path in folder.glob("global_step_*")} == {"global_step_2", "global_step_3", "global_step_4"}


def test_nothing_of_ray_is_left(trained):
    assert not processes_of(trained)


def test_a_killed_verl_goes_on_and_loses_no_record(fields, tmp_path):
    job = write_job(tmp_path, "rl", **fields | {"settings": SETTINGS | {"reference_refresh_steps": None, "steps": 6}})
    kill_at(job, 3, timeout=300)
    wait_until(lambda: not processes_of(tmp_path), timeout=60)  # they end with it
    before = metrics(tmp_path)
    run(job, timeout=500)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert metrics(tmp_path)[:2] == before[:2]  # from a checkpoint
    assert result(tmp_path)["steps_completed"] == 6


def test_two_machines_form_a_cluster_of_ray(fields, tmp_path):
    trainer = {"kind": "verl", "python": PYTHON, "options": SAMPLING_OPTIONS}
    hardware = CPU | {"processes": 1, "nodes": 2, "trainer": trainer}
    settings = SETTINGS | {"steps": 2, "reference_refresh_steps": None, "hardware": hardware}
    job = write_job(tmp_path, "rl", **fields | {"settings": settings})
    # A name, as Slurm and Kubernetes give: Ray keeps it, and each machine resolves it.
    place = f"{socket.gethostname()}:{free_port()}"
    meeting = {"PET_RDZV_ENDPOINT": place, "PET_RDZV_ID": "a meeting", **ONE_DEVICE}
    machines = job_runner.start_on_two_machines(job, meeting)
    wait_until(lambda: metrics(tmp_path) or any(machine.poll() for machine in machines), timeout=400)
    ask = f"from ray._raylet import GcsClient; GcsClient(address={place!r})"
    refused = subprocess.run(
        [PYTHON, "-c", ask], env=job_runner.ENVIRONMENT, capture_output=True, text=True, timeout=100
    )
    assert "token is missing" in refused.stderr
    assert [machine.wait(timeout=500) for machine in machines] == [0, 0]
    assert steps(tmp_path) == [1, 2] and result(tmp_path)["steps_completed"] == 2
    assert not processes_of(tmp_path)


def test_a_reward_that_fails_stops_verl(fields, tmp_path):
    settings = SETTINGS | {"rewards": {"tests.support.user_rewards:broken": 1}}
    done = run(write_job(tmp_path, "rl", **fields | {"settings": settings}), expected=1, timeout=300)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: training stopped: rewards failed for 8 of 8 completions (8 error)")
    assert not processes_of(tmp_path)


def processes_of(folder: Path) -> list[str]:
    """The command lines of processes that were started for a job in this folder, with what they inherited."""
    found = []
    for process in psutil.process_iter():
        try:
            command, inherited = process.cmdline(), process.environ().values()
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(folder) in word for word in [*command, *inherited]):
            found.append(" ".join(command))
    return found


OBJECTIVES_IN_VERL = """
import json
from types import SimpleNamespace
import torch
from verl.trainer.ppo.core_algos import agg_loss, get_adv_estimator_fn, get_policy_loss_fn, kl_penalty
from grpo.algorithms.advantages import ADVANTAGES
from grpo.algorithms.objectives import OBJECTIVES, Objective, constant_mean
from grpo.algorithms.tokens import Normalizers, Tokens
import grpo.trainers.verl.plugins.algorithms
from grpo.trainers.verl.protocol import advantage_name, objective_name
from grpo.trainers.verl.rl_settings import _MEANS

torch.manual_seed(0)
random = lambda: torch.randn(6, 9, dtype=torch.float64)
old, reference, advantages = random() * 0.3 - 2, random() * 0.3 - 2, random()
mask = (torch.arange(9) < torch.tensor([[9], [4], [1], [7], [9], [2]])).double()
weights = random().exp().clamp(max=2)
worst = {}
for name, form in OBJECTIVES.items():
    if name in ("grpo_sequence", "bnpo"):
        continue
    for kind in ("k1", "k2", "k3"):
        shares = []
        logprobs = (old + random() * 0.3).requires_grad_()
        budget = 12 if form.mean is constant_mean else None
        for rows in (slice(0, 2), slice(2, 6)):  # two micro-batches of a step
            whole = dict(dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=6, loss_scale_factor=budget)
            config = SimpleNamespace(clip_ratio_low=0.2, clip_ratio_high=0.3, global_batch_info=whole)
            loss, _ = get_policy_loss_fn(objective_name(name))(
                old_log_prob=old[rows], log_prob=logprobs[rows], advantages=advantages[rows],
                response_mask=mask[rows], loss_agg_mode="?", config=config, rollout_is_weights=weights[rows])
            kl = kl_penalty(logprob=logprobs[rows], ref_logprob=reference[rows], kl_penalty=kind)
            shares.append(loss + 0.5 * agg_loss(kl, mask[rows], _MEANS[form.mean], **whole))
        (theirs,) = torch.autograd.grad(sum(shares), logprobs)
        ours = Objective(name, clip_eps_low=0.2, clip_eps_high=0.3, kl_coef=0.5, kl_estimator=kind,
                         kl_stale_correction=False)
        value, _ = ours(Tokens(logprobs, old, reference, advantages * weights, mask),
                        Normalizers(6, int(mask.sum()), budget or 9))
        (own,) = torch.autograd.grad(value, logprobs)
        worst[f"{name} {kind}"] = max((sum(shares) - value).abs().item(), (theirs - own).abs().max().item())
for name, function in ADVANTAGES.items():
    for std in ("population", "sample"):
        rewards = torch.tensor([[0.0, 1.0, 1.0], [2.0, 0.5, 0.25], [1.0, 1.0, 1.0]], dtype=torch.float64)
        order = torch.randperm(9)
        scores = torch.zeros(9, 4, dtype=torch.float64)
        scores[:, -1] = rewards.flatten()[order]
        groups = [["a", "b", "c"][number // 3] for number in order.tolist()]
        estimate = get_adv_estimator_fn(advantage_name(name, std))
        got, _ = estimate(token_level_rewards=scores, response_mask=torch.ones(9, 4), index=groups, config=None)
        worst[f"{name} {std}"] = (got[:, 0] - function(rewards, std).flatten()[order]).abs().max().item()
print(json.dumps(worst))
"""


def test_objectives_and_advantages_in_verl_are_this_librarys():
    done = subprocess.run(
        [PYTHON, "-c", OBJECTIVES_IN_VERL], env=job_runner.ENVIRONMENT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    worst = json.loads(done.stdout.splitlines()[-1])
    assert len(worst) == 8 * 3 + 4 * 2
    assert max(worst.values()) < 1e-7, worst  # verl's mean over a sequence divides by its length + 1e-8
