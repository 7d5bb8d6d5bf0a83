"""Resume equivalence: however often a run is killed, it ends with the same weights and metrics, bit by bit."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.job_runner import (
    COMMAND,
    ENVIRONMENT,
    RL,
    ROOT,
    metrics,
    result,
    run,
    same,
    steps,
    weights,
    write_job,
)

EVERYTHING = {
    **RL,
    "inner_epochs": 2,  # with two minibatches four updates a rollout: every other checkpoint holds one half used
    "save_every": 2,
    "reference_mixing": 0.5,
    "dynamic_sampling_rounds": 1,
    "curriculum": {"rest": 1},
    "max_new_tokens_from": {"20": 8},
}
TIMES = {"tokens_per_s", "sampling_s", "update_s"}


def untimed(folder: Path) -> list[dict]:
    return [{k: v for k, v in record.items() if k not in TIMES} for record in metrics(folder)]


def start(job: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, job], cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)


def kill_when(job: Path, reached) -> bool:
    """Run the job until `reached()`, then SIGKILL; whether it was in time."""
    process = start(job)
    while process.poll() is None and not reached():
        pass  # no pause: a checkpoint is written in milliseconds
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [{}, {"method": "ppo"}, {"lora": {"rank": 4}, "reference_refresh_steps": None, "reference_mixing": 1.0}],
    ids=["grpo", "ppo", "lora"],
)
def test_killed_ten_times_it_ends_where_an_undisturbed_run_does(method, rl_fields, tmp_path):
    fields = {**rl_fields, "settings": EVERYTHING | method}
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    run(write_job(undisturbed, "rl", **fields))
    job = write_job(killed, "rl", **fields)
    writing = killed / "state" / "writing"
    points = sorted(random.Random(0).sample(range(2, 36), 7))
    for point in points:
        assert kill_when(job, lambda point=point: len(metrics(killed)) >= point)
    inside = 0
    for _ in range(8):
        shutil.rmtree(writing, ignore_errors=True)
        assert kill_when(job, writing.exists), "the run ended before it was killed in a checkpoint's writing"
        inside += writing.exists()
        if inside == 3:
            break
    assert inside == 3, f"only {inside} kills met a half-written checkpoint"
    run(job)
    assert steps(killed) == list(range(1, 41))
    assert untimed(killed) == untimed(undisturbed)
    assert same(weights(killed), weights(undisturbed))
    assert result(killed) == result(undisturbed)
