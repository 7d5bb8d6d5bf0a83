"""Whole jobs in several processes: the same update as one makes, and a run that goes on with another number."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from grpo.data.held_out import read_held_out
from grpo.data.records import Problem, write_rows
from grpo.training.selection import PREFIX
from tests.support.job_runner import COMMAND, CPU, ENVIRONMENT, RL, ROOT, SFT, metrics, run, user, write_job

pytestmark = pytest.mark.system

STEPS = {**RL, "steps": 3, "save_every": 1, "minibatches": 1}


def start(job: Path, processes: int) -> subprocess.Popen[str]:
    command = [*COMMAND, "--processes", str(processes), str(job)]
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run_in(job: Path, processes: int) -> None:
    with start(job, processes) as process:
        said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / "model.safetensors")


def assert_same(folder: Path, other: Path, within: float) -> None:
    ours, theirs = weights(folder), weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=within, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def assert_nearly_same(folder: Path, other: Path) -> None:
    """Divided layers add products in another order as well. Adam moves a weight whose gradient is hardly more than that
    rounding by a part of the learning rate all the same: a few in ten thousand here."""
    ours, theirs = weights(folder), weights(other)
    differences = torch.cat([(tensor - theirs[name]).abs().flatten() for name, tensor in ours.items()])
    assert ours.keys() == theirs.keys() and differences.max() < 3e-4
    assert (differences > 1e-5).float().mean() < 1e-3 and differences.mean() < 1e-6


@pytest.fixture(scope="module")
def alone(rl_fields, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run(write_job(folder, "rl", **{**rl_fields, "settings": STEPS}))
    return folder


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_make_the_updates_of_one(processes, alone, rl_fields, tmp_path):
    run_in(write_job(tmp_path, "rl", **{**rl_fields, "settings": STEPS}), processes)
    same = [(r["step"], r["reward"], r["completion_tokens"]) for r in metrics(alone)]
    assert [(r["step"], r["reward"], r["completion_tokens"]) for r in metrics(tmp_path)] == same  # same completions
    # Adam's steps are about the learning rate, 0.003, in size; sums in another order move them by thousandths of that.
    assert_same(tmp_path, alone, within=1e-5)


@pytest.mark.slow
def test_reward_models_are_shared_too(rl_fields, reward_models, tmp_path):
    """Of six problems a step three are general, so one process has more of them than the other."""
    asked = [Problem(f"v{i}", user(f"Say {i}!"), "", "none", "general", "en", "test") for i in range(3)]
    asked += [
        Problem(f"v{i}+5", user(f"What is {i} + 5?"), str(i + 5), "number", "reasoning", "en", "test") for i in range(3)
    ]
    write_rows(tmp_path / "validation.parquet", asked, Problem)
    settings = {**STEPS, "prompts_per_step": 6, "general_last_steps": 3, "general_share": 0.5, "validate_every": 3}
    settings |= {"rewards": {"accuracy": 1, "helpful": 0.1, "safe": 1}, "validation": {"problems": 3}}
    models = {"helpful_model": reward_models["pairs"] / "out", "safe_model": reward_models["points"] / "out"}
    models["validation_problems"] = [tmp_path / "validation.parquet"]
    for processes in (1, 2):
        run_in(write_job(tmp_path / str(processes), "rl", **{**rl_fields, **models, "settings": settings}), processes)
    one, two = metrics(tmp_path / "1"), metrics(tmp_path / "2")
    for ours, theirs in zip(one, two, strict=True):
        for name in ("reward_helpful", "reward_safe", "reward"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-4)
    assert one[2][PREFIX + "helpful"] == pytest.approx(two[2][PREFIX + "helpful"], abs=1e-3)
    assert one[0]["reward_helpful"] != 0 and 0 < one[0]["reward_safe"] < 1
    assert_same(tmp_path / "1", tmp_path / "2", within=1e-5)


@pytest.mark.slow
def test_adapters_and_their_reference_too(rl_fields, tmp_path):
    settings = {**STEPS, "lora": {"rank": 2, "alpha": 32}, "kl_coef": 0.1, "reference_refresh_steps": None}
    for processes in (1, 2):
        run_in(write_job(tmp_path / str(processes), "rl", **{**rl_fields, "settings": settings}), processes)
    one, two = metrics(tmp_path / "1"), metrics(tmp_path / "2")
    assert [r["kl"] for r in one] == pytest.approx([r["kl"] for r in two], abs=1e-5)
    assert one[0]["kl"] == pytest.approx(0, abs=1e-6) and one[2]["kl"] > 1e-3  # the adapters have learnt
    assert_same(tmp_path / "1", tmp_path / "2", within=1e-5)


@pytest.mark.parametrize("way", ["sequence_parallel", "tensor_parallel"])
def test_processes_that_share_sequences_make_the_updates_of_one(way, alone, rl_fields, tmp_path):
    settings = {**STEPS, "hardware": {**CPU, "processes": 2, way: 2}}
    run_in(write_job(tmp_path, "rl", **{**rl_fields, "settings": settings}), 2)
    keys = ("step", "reward", "completion_tokens")
    assert [[r[key] for key in keys] for r in metrics(tmp_path)] == [[r[key] for key in keys] for r in metrics(alone)]
    for ours, theirs in zip(metrics(tmp_path), metrics(alone), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)  # counted once, not by each process
    assert_nearly_same(tmp_path, alone)
    if way == "sequence_parallel":
        assert_same(tmp_path, alone, within=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("hardware", [{}, {"processes": 2, "tensor_parallel": 2}], ids=str)
def test_a_killed_run_goes_on_with_another_number_of_processes(hardware, alone, rl_fields, tmp_path):
    divided = {**STEPS, "hardware": {**CPU, **hardware}}
    with start(write_job(tmp_path, "rl", **{**rl_fields, "settings": divided}), 2) as process:
        while not [*(tmp_path / "state").glob("step-*")]:
            assert process.poll() is None, process.communicate()[0]
        process.send_signal(signal.SIGKILL)
    assert len(metrics(tmp_path)) < 3
    run(write_job(tmp_path, "rl", **{**rl_fields, "settings": STEPS}))
    assert [r["step"] for r in metrics(tmp_path)] == [1, 2, 3]
    assert_nearly_same(tmp_path, alone)
    if not hardware:
        assert_same(tmp_path, alone, within=1e-5)


@pytest.mark.slow
def test_sft_too(sft_fields, tmp_path):
    settings = {**sft_fields["settings"], "max_steps": 4}
    shared, divided = (
        {**settings, "hardware": {**CPU, "processes": 2, way: 2}} for way in ("sequence_parallel", "tensor_parallel")
    )
    for name, own in (("1", settings), ("2", settings), ("shared", shared), ("divided", divided)):
        run_in(write_job(tmp_path / name, "sft", **{**sft_fields, "settings": own}), 1 if name == "1" else 2)
    for name in ("2", "shared"):
        assert_same(tmp_path / "1", tmp_path / name, within=1e-5)
    for name in ("2", "shared", "divided"):
        assert_nearly_same(tmp_path / "1", tmp_path / name)
        for ours, theirs in zip(metrics(tmp_path / name), metrics(tmp_path / "1"), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


@pytest.mark.slow
def test_a_reward_model_too_and_its_held_out_scores(sft, tmp_path):
    ranked = [(i, better, worse) for i in range(24) for better in range(i % 3) for worse in range(better + 1, 4)]
    rows = [
        {"messages": user(f"Say {i}"), "chosen": "yes " * (4 - a), "rejected": "yes " * (4 - b), "held_out": i % 4 == 0}
        for i, a, b in ranked
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    fields = {"model": sft / "out", "data": tmp_path / "data.parquet", "loss": "pairs", "bootstrap": True}
    for processes in (1, 2):
        job = write_job(tmp_path / str(processes), "reward_model", settings={**SFT, "max_steps": 4}, **fields)
        run_in(job, processes)
    assert_same(tmp_path / "1", tmp_path / "2", within=1e-5)
    one, two = (read_held_out(tmp_path / folder / "out") for folder in ("1", "2"))
    assert [row["chosen"] for row in one] == [row["chosen"] for row in two] and len(one) > 6
    assert [row["chosen_score"] for row in one] == pytest.approx([row["chosen_score"] for row in two], abs=1e-3)


@pytest.mark.slow
def test_a_process_reward_model_too_and_its_held_out_scores(sft, tmp_path):
    rows = []
    for i in range(24):
        steps = ["yes " * (i % 3 + k + 1) for k in range(i % 4 + 1)]
        ends = [sum(len(step) + 1 for step in steps[: k + 1]) - 1 for k in range(len(steps))]
        right = [(i + k) % 3 for k in range(len(steps))]
        asked = {"messages": user(f"Say {i}"), "response": "\n".join(steps) + "\n", "ends": ends}
        rows.append({**asked, "right": right, "rollouts": 2, "held_out": i % 3 == 0})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    fields = {"model": sft / "out", "data": tmp_path / "data.parquet", "settings": {**SFT, "max_steps": 4}}
    for processes in (1, 3):
        run_in(write_job(tmp_path / str(processes), "process_reward_model", **fields), processes)
    assert_same(tmp_path / "1", tmp_path / "3", within=1e-5)
    one, three = (read_held_out(tmp_path / folder / "out") for folder in ("1", "3"))
    assert [row["messages"] for row in one] == [row["messages"] for row in three] and len(one) == 8
    for ours, theirs in zip(one, three, strict=True):
        assert len(ours["scores"]) == len(ours["ends"]) and ours["scores"] == pytest.approx(theirs["scores"], abs=1e-3)


def test_wrong_input_is_one_line_in_several_processes_too(rl_fields, tmp_path):
    job = write_job(tmp_path, "rl", **{**rl_fields, "model": "/no/such/model"})
    with start(job, 2) as process:
        said = process.communicate(timeout=120)[0]
    assert process.returncode != 0
    assert "error: /no/such/model: no such model folder" in said
