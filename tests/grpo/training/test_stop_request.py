"""A job that is told to stop writes a checkpoint after its step, ends by the signal, and goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from grpo.processes.stop_request import StopRequest
from tests.support.job_runner import (
    COMMAND,
    ENVIRONMENT,
    ROOT,
    marked,
    metrics,
    run,
    same,
    steps,
    wait_until,
    weights,
    write_job,
)


def test_the_signal_is_noted_and_then_has_its_effect_again() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.asked
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_forked_child_ends_at_once() -> None:
    ready, say = os.pipe()
    with StopRequest() as request:
        child = os.fork()
        if child == 0:
            os.write(say, b"x")  # Python drops a signal that arrives while it forks
            while True:
                time.sleep(1)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        assert not request.asked


def stop_after(path: Path, step: int) -> None:
    process = subprocess.Popen([*COMMAND, path], cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while process.poll() is None and len(metrics(path.parent)) < step:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM, errors


@pytest.mark.system
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_checkpoint_is_written_between_the_planned_ones(
    kind: str, tmp_path: Path, rl_fields: dict[str, Any], sft_fields: dict[str, Any]
) -> None:
    fields = {"rl": rl_fields, "sft": sft_fields}[kind]
    fields = {**fields, "settings": {**fields["settings"], "save_every": 1000}}
    whole, stopped = (write_job(tmp_path / name, kind, **fields) for name in ("whole", "stopped"))
    run(whole)
    stop_after(stopped, 2)
    reached = len(metrics(stopped.parent))
    (saved,) = (stopped.parent / "state").glob("step-*")
    assert 2 <= reached < len(metrics(whole.parent)) and int(saved.name.removeprefix("step-")) == reached
    run(stopped)
    assert steps(stopped.parent) == steps(whole.parent)
    assert same(weights(stopped.parent), weights(whole.parent))


@pytest.mark.system
def test_a_signal_to_the_second_process_alone_stops_all(tmp_path: Path, rl_fields: dict[str, Any]) -> None:
    """As on two machines of which one is taken away."""
    settings = {**rl_fields["settings"], "save_every": 1000, "hardware": {"device": "cpu", "processes": 2}}
    path = write_job(tmp_path, "rl", **{**rl_fields, "settings": settings})
    environment = {**ENVIRONMENT, "R1FLOW_TEST": str(tmp_path)}
    process = subprocess.Popen([*COMMAND, path], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: process.poll() is not None or len(metrics(tmp_path)) >= 2, 600)
    (second,) = marked("RANK=1", f"R1FLOW_TEST={tmp_path}")
    os.kill(second, signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0, errors
    (saved,) = (tmp_path / "state").glob("step-*")
    assert int(saved.name.removeprefix("step-")) == len(metrics(tmp_path)) >= 2
