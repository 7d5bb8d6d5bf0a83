"""Completions that attack the machine, inside a real training run: it goes on, counts them, and leaves nothing."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.job_runner import RL, metrics, run, steps, write_job
from tests.support.user_rewards import HOSTILE, VERIFIERS


def processes_of(mark: str) -> dict[str, str]:
    """Command lines of the processes that have `mark` in their environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found[entry.name] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # no process, or gone
            continue
    return found


@pytest.mark.slow
def test_training_goes_on_among_hostile_programs(rl_fields, tmp_path, monkeypatch):
    scratch, turns = tmp_path / "tmp", tmp_path / "turns"
    scratch.mkdir()
    turns.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        options = {"folder": str(turns), "port": server.getsockname()[1]}
        settings = {
            **RL,
            "steps": 3,
            "minibatches": 1,
            "group_size": 9,
            "rewards": {"format": 1, "tests.support.user_rewards:hostile": {"weight": 1, **options}},
            "scoring": {"workers": 2, "time_limit_s": 20, "max_failure_share": 1.0},
        }
        monkeypatch.setenv("TMPDIR", str(scratch))
        run(write_job(tmp_path / "job", "rl", **{**rl_fields, "settings": settings}), timeout=600)
        with pytest.raises(BlockingIOError):  # nobody connected
            server.accept()
    records = metrics(tmp_path / "job")
    assert steps(tmp_path / "job") == [1, 2, 3]
    # 18 completions a step, nine troubles that take turns: two of each.
    assert len(HOSTILE) + len(VERIFIERS) == 9
    counts = [{k: v for k, v in r.items() if k.startswith("reward_failures_")} for r in records]
    for count in counts:
        assert count["reward_failures_timeout"] == 2  # the hanging verifier
        assert count["reward_failures_crash"] == 2  # the dying one
        assert count["reward_failures_code_timeout"] >= 2  # the endless program
        assert count["reward_failures_code_memory"] == 2
        assert count["reward_failures_code_output"] == 2
        assert count["reward_failures_code_disk"] == 2
        assert sum(count.values()) >= 14
    assert processes_of(str(scratch)) == {}
    assert list(scratch.iterdir()) == []
