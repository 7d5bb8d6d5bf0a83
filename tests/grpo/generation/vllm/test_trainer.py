"""GRPO whose rollouts a real vLLM samples: in the trainer's process, and as a server that is a rollout ahead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.errors import TrainingStopped
from grpo.generation.vllm.client import ServerVLLM
from tests.support.job_runner import ENVIRONMENT, RL, ROOT, metrics, result, run_here, steps, write_job
from tests.support.vllm_models import PYTHON, needs_vllm, tiny_experts, tiny_llama
from tests.support.vllm_server import served

pytestmark = [pytest.mark.slow, needs_vllm]

EXACT = 2e-4
LOCAL = {"kind": "local", "enforce_eager": True, "max_model_len": 256, "kv_cache_gb": 0.25}
QUIET = {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
LETTERS = {"tests.support.user_rewards:letters": 1}
SETTINGS = {
    **RL,
    "steps": 6,
    "minibatches": 1,
    "group_size": 8,
    "rewards": LETTERS,
    "sampling": {"max_new_tokens": 24, "batch_size": 64},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with served(model, tmp_path_factory.mktemp("server") / "log") as (url, _):
        yield {"kind": "server", "url": url, "retries": 10, "timeout_s": 120}


def job(folder, model, problems, **settings):
    return write_job(folder, "rl", settings={**SETTINGS, **settings}, model=model, problems=[problems])


def test_in_the_trainers_process(model, problems, tmp_path):
    """Every step is sampled with the weights of the step before: those of the first would differ ever more."""
    command = [PYTHON, "-m", "grpo.train", job(tmp_path, model, problems, engine=LOCAL)]
    done = subprocess.run(command, cwd=ROOT, env=QUIET, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    records = metrics(tmp_path)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert all(0 < r["logprob_mismatch"] < EXACT for r in records)
    assert all(r["ratio_max"] == pytest.approx(1) for r in records)
    assert records[4]["kl"] > 1e-4  # the policy did move; after step 5 the reference follows it
    assert result(tmp_path)["steps_completed"] == 6


@pytest.mark.parametrize(
    ("kind", "processes", "share"), [("llama", 2, 1), ("llama", 2, 2), ("qwen3_moe", 1, 1), ("qwen3_moe", 2, 1)]
)
def test_weights_of_a_sharded_policy_arrive(kind, processes, share, model, problems, tmp_path):
    """Each process has a vLLM of its own, or two share one; experts are sent one by one."""
    policy = model if kind == "llama" else tiny_experts(kind, tmp_path / "model")
    engine = {**LOCAL, "tensor_parallel_size": share}
    command = [PYTHON, "-m", "grpo.train", "--processes", str(processes)]
    command.append(job(tmp_path, policy, problems, engine=engine, steps=3))
    done = subprocess.run(command, cwd=ROOT, env=QUIET, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    assert steps(tmp_path) == [1, 2, 3]
    assert all(0 < r["logprob_mismatch"] < EXACT for r in metrics(tmp_path))
    assert not [*Path("/dev/shm").glob("*cpushm*")]  # it would be in the next job's way


def test_a_server_one_rollout_ahead(model, server, problems, tmp_path):
    run_here(job(tmp_path, model, problems, engine=server, rollouts_ahead=1))
    records = metrics(tmp_path)
    assert [r["sampler_age"] for r in records] == [0, 1, 1, 1, 1, 1]
    assert all(r["sampler_difference_max"] > EXACT for r in records[1:])  # it sampled with older weights


def test_a_server_in_step_with_two_minibatches(model, server, problems, tmp_path):
    run_here(job(tmp_path, model, problems, engine=server, minibatches=2))
    records = metrics(tmp_path)
    assert all(0 < r["logprob_mismatch"] < EXACT for r in records)
    assert [r["ratio_max"] < 1 + EXACT for r in records] == [True, False] * 3


def test_a_missed_update_stops_the_run(model, server, problems, tmp_path, monkeypatch):
    update = ServerVLLM.update

    def skips_the_third(self, new, version):
        if version != 2:
            update(self, new, version)

    monkeypatch.setattr(ServerVLLM, "update", skips_the_third)
    with pytest.raises(
        TrainingStopped, match="^the sampler holds version 1 of the weights and the policy is at version 2"
    ):
        run_here(job(tmp_path, model, problems, engine=server))
    assert steps(tmp_path) == [1, 2]


def test_an_update_by_another_trainer_stops_the_run(model, server, problems, tmp_path, monkeypatch):
    """The trainer believes what it sent; the server's completions say by which weights they were written."""
    monkeypatch.setattr(ServerVLLM, "version", lambda self: self._held)
    update = ServerVLLM.update

    def and_another(self, new, version):
        new = list(new)
        update(self, new, version)
        if version == 2:
            update(self, new, 77)
            self._held = version

    monkeypatch.setattr(ServerVLLM, "update", and_another)
    with pytest.raises(TrainingStopped, match="sampled by version 77 of the weights, not 2"):
        run_here(job(tmp_path, model, problems, engine=server))


def test_rft_samples_the_policy_as_it_was(model, server, problems, tmp_path):
    run_here(
        job(tmp_path, model, problems, engine=server, method="rft", lora={"rank": 4}, reference_refresh_steps=None)
    )
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert "sampler_difference" not in metrics(tmp_path)[0]


def test_the_engine_named_without_vllm_installed_is_one_clear_line(model, problems, tmp_path):
    path = job(tmp_path, model, problems, engine={"kind": "local"})
    command = [sys.executable, "-m", "grpo.train", path]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "error: vllm is not installed here; pip install vllm, or choose another engine",
    )
