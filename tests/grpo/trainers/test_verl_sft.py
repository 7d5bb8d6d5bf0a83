"""SFT by a real verl in an environment of its own: the same batches, losses, gradients and rates as this library's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from flows.prefect_server import free_port
from grpo.config.common import Optimizer
from grpo.train import read_job
from grpo.trainers.verl.settings import rate_share
from grpo.training.optimizer import learning_rate_share
from tests.support import job_runner
from tests.support.job_runner import CPU, SFT, kill_at, metrics, result, run, steps, wait_until, weights, write_job
from tests.support.verl_environment import ON_CPU, PYTHON, needs_verl

pytestmark = [pytest.mark.system, needs_verl]

STEPS = 8
BY_VERL = {"kind": "verl", "python": PYTHON}
SHORT = SFT | {"max_steps": STEPS, "save_every": 3}
TWO = CPU | {"processes": 2, "trainer": BY_VERL}


@pytest.fixture(autouse=True)
def verl_on_a_cpu(monkeypatch):
    monkeypatch.setattr(job_runner, "ENVIRONMENT", job_runner.ENVIRONMENT | ON_CPU)


@pytest.fixture(scope="module")
def own(sft_fields, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    run(write_job(folder, "sft", **sft_fields | {"settings": SHORT}))
    return folder


def by_verl(folder: Path, sft_fields, **changed) -> Path:
    settings = SHORT | {"hardware": TWO} | changed
    return write_job(folder, "sft", **sft_fields | {"settings": settings})


def assert_equal_training(ours: Path, theirs: Path) -> None:
    assert steps(theirs) == list(range(1, STEPS + 1))
    for a, b in zip(metrics(ours), metrics(theirs), strict=True):
        near = 1e-6 if a["step"] == 1 else 1e-4  # rounding grows with the steps, at a rate of 0.01
        assert b["loss"] == pytest.approx(a["loss"], rel=near)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=10 * near)
        assert b["learning_rate"] == pytest.approx(a["learning_rate"], rel=1e-12)


def test_verl_makes_the_updates_of_this_library(own, sft_fields, tmp_path):
    # 25 sequences in batches of 8: the fourth batch of an epoch is one sequence. verl's batches are all equally large.
    run(by_verl(tmp_path, sft_fields), timeout=300)
    assert_equal_training(own, tmp_path)
    written = result(tmp_path)
    assert written["steps_completed"] == written["steps_planned"] == STEPS
    assert written["counts"] == result(own)["counts"] == {"sequences": 25, "too_long": 0}
    assert written["metrics"]["loss"] == pytest.approx(result(own)["metrics"]["loss"], rel=1e-4)
    ours, theirs = weights(own), weights(tmp_path)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        # AdamW moves a weight by the rate even where its gradient is all but rounding: single weights may differ.
        assert (tensor - ours[name]).abs().mean() < 1e-4 * ours[name].abs().mean()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (own / "out" / name).read_bytes()
    assert "verl/train/mfu" in metrics(tmp_path)[0]


def test_a_killed_verl_goes_on_and_loses_no_record(own, sft_fields, tmp_path):
    job = by_verl(tmp_path, sft_fields)
    kill_at(job, 5, timeout=200)
    wait_until(lambda: not processes_of(tmp_path))  # the ranks end with it
    done = run(job, timeout=300)
    assert re.search(r"Found latest checkpoint: .* \(step [36]\)", done.stdout)
    assert_equal_training(own, tmp_path)


def test_two_machines_train_as_one(own, sft_fields, tmp_path):
    job = by_verl(tmp_path, sft_fields, hardware=TWO | {"processes": 1, "nodes": 2})
    meeting = {"PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}", "PET_RDZV_ID": "a meeting"}
    machines = job_runner.start_on_two_machines(job, meeting)
    assert [machine.wait(timeout=300) for machine in machines] == [0, 0]
    assert_equal_training(own, tmp_path)
    assert result(tmp_path)["steps_completed"] == STEPS


def test_machines_that_do_not_know_where_to_meet(sft_fields, tmp_path):
    done = run(by_verl(tmp_path, sft_fields, hardware=TWO | {"processes": 1, "nodes": 2}), expected=2)
    assert "nothing says where the machines meet: set PET_RDZV_ENDPOINT" in done.stderr


def processes_of(folder: Path) -> list[str]:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines()
    return [line for line in listed if "sft_trainer" in line and str(folder) in line]


def test_the_rates_of_a_warm_up_are_those_that_are_stated(sft_fields, tmp_path):
    optimizer = {"learning_rate": 0.01, "final_learning_rate_share": 0.1, "warmup_steps": 3}
    run(by_verl(tmp_path, sft_fields, optimizer=optimizer), timeout=300)
    rates = [record["learning_rate"] for record in metrics(tmp_path)]
    settings = Optimizer(**optimizer)
    assert rates == pytest.approx([0.01 * rate_share(step, STEPS, settings) for step in range(STEPS)])
    ours = [0.01 * learning_rate_share(step, STEPS, settings) for step in range(STEPS)]
    assert rates[:3] == pytest.approx(ours[:3])  # the warm-up is ours
    assert rates[3:-1] == pytest.approx(ours[4:])  # the decay is a step ahead


def test_another_number_of_processes_cannot_go_on(sft_fields, tmp_path):
    job = by_verl(tmp_path, sft_fields)
    run(job, timeout=300)
    job = by_verl(tmp_path, sft_fields, hardware=TWO | {"processes": 1})
    done = run(job, expected=2)
    assert "hardware.processes * hardware.nodes is 1, but verl's checkpoint of step 8 was written with 2" in done.stderr


def test_a_failure_in_verl_is_its_own_line(sft_fields, tmp_path):
    job = by_verl(tmp_path, sft_fields, hardware=TWO | {"trainer": BY_VERL | {"options": ["engine.strategy=nothing"]}})
    done = run(job, expected=1, timeout=300)
    last = done.stderr.strip().splitlines()[-1]
    assert re.match(
        r"error: training stopped: process [01] of 2 of verl ended with 1: [\w.]*(Error|Exception)", last
    ), last


def test_another_version_is_refused(sft_fields, tmp_path):
    job = by_verl(tmp_path, sft_fields, hardware=TWO | {"trainer": BY_VERL | {"version": "0.1.0"}})
    done = run(job, expected=2)
    assert "hardware.trainer.version is 0.1.0, but" in done.stderr and "has verl 0.9.1" in done.stderr
    assert not os.listdir(tmp_path / "out")


def test_weights_that_can_run_code_are_not_given_to_verl(sft_fields, tmp_path):
    pickled = tmp_path / "model"
    shutil.copytree(sft_fields["model"], pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    done = run(by_verl(tmp_path / "job", sft_fields | {"model": pickled}), expected=2)
    assert "safetensors" in done.stderr.strip().splitlines()[-1]


def test_a_trained_model_that_was_not_published_is_not_trained_again(sft_fields, tmp_path):
    job = by_verl(tmp_path, sft_fields)
    run(job, timeout=300)
    shutil.rmtree(read_job(job).out)
    (tmp_path / "result.json").unlink()
    run(job)
    assert result(tmp_path)["steps_completed"] == STEPS
    assert weights(tmp_path)
