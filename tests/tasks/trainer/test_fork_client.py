"""Trainers as forks of a process that has loaded what they need: real jobs of grpo/, launched as flows launch them."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo.errors import InputError
from grpo.processes.lifetime import process_name
from tasks.trainer import fork_client
from tasks.trainer.launch import launch, preload
from tasks.trainer.outcome import StageFailed

pytestmark = [pytest.mark.system, pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")]


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fork_client, "_ACCELERATORS", ())
    with fork_client.fork_server():
        yield
    assert fork_client._server is None


def job(folder: Path, **settings: Any) -> dict[str, Any]:
    folder.mkdir()
    (folder / "corpus.txt").write_text("the cat is old\n\n" * 200)
    small = {"vocabulary": 300, "hidden": 16, "feed_forward": 32, "layers": 1, "heads": 2, "context": 64}
    plan = {"steps": 3, "batch_size": 4, "optimizer": {"learning_rate": 1e-3}}
    own = {name: str(folder / name) for name in ("out", "state")}
    own |= {"metrics": str(folder / "work/metrics.jsonl"), "result": str(folder / "work/result.json")}
    corpus = str(folder / "corpus.txt")
    return {"kind": "pretrain", "seed": 0, "corpus": corpus, "settings": {**small, **plan, **settings}, **own}


def train(folder: Path, on_metrics: Any = lambda records: None, **settings: Any) -> dict[str, Any]:
    return launch(job(folder, **settings), folder / "work", on_metrics=on_metrics)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def trainer() -> int:
    """The process that is being forked from the warm one."""
    assert fork_client._server is not None
    there = f"/proc/{fork_client._server.process.pid}/task/{fork_client._server.process.pid}/children"
    deadline = time.monotonic() + 300
    while not (children := Path(there).read_text().split()):
        assert time.monotonic() < deadline, "nothing was forked"
        time.sleep(0.05)
    return int(children[0])


def test_a_fork_trains_as_a_process_of_its_own_does(tmp_path: Path) -> None:
    preload()
    first, second = train(tmp_path / "a"), train(tmp_path / "b")
    server = fork_client._server
    assert server is not None and server.launches == 2
    fork_client._server = None
    try:
        cold = train(tmp_path / "c")
    finally:
        fork_client._server = server
    assert first == second == cold
    made = [(tmp_path / name / "out/model.safetensors").read_bytes() for name in "abc"]
    assert made[0] == made[1] == made[2]


def test_what_a_fork_refuses_is_said_and_the_next_one_is_not_told(tmp_path: Path) -> None:
    preload()
    with pytest.raises(InputError, match=r"settings\.layers"):
        train(tmp_path / "bad", layers=0)
    assert "layers" in (tmp_path / "bad/work/trainer.log").read_text()
    assert train(tmp_path / "good")["steps_completed"] == 3
    assert fork_client._server is not None and fork_client._server.launches == 2


def test_a_fork_holds_the_lock_that_it_is_given(tmp_path: Path) -> None:
    preload()
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    held: list[bool] = []

    def look(records: list[dict[str, Any]]) -> None:
        if not held:  # it is told of the last ones, too
            held.append(os.stat(tmp_path / "lock").st_ino in [os.stat(p).st_ino for p in fds(trainer())])

    def fds(pid: int) -> list[str]:
        return [f"/proc/{pid}/fd/{p.name}" for p in Path(f"/proc/{pid}/fd").iterdir() if p.exists()]

    launch(job(tmp_path / "a", steps=300), tmp_path / "a/work", on_metrics=look, lock_fd=lock)
    assert held[0]
    os.close(lock)
    assert fork_client._server is not None
    inode = os.stat(tmp_path / "lock").st_ino
    assert inode not in [os.stat(p).st_ino for p in fds(fork_client._server.process.pid)]


def test_a_killed_fork_is_told_by_its_signal_and_the_next_one_continues(tmp_path: Path) -> None:
    preload()
    folder = tmp_path / "a"
    long = job(folder, steps=100_000)
    killer = threading.Thread(target=lambda: os.kill(trainer(), signal.SIGKILL))
    killer.start()
    with pytest.raises(StageFailed, match="killed by SIGKILL"):
        launch(long, folder / "work", on_metrics=lambda records: None)
    killer.join()
    assert train(tmp_path / "b")["steps_completed"] == 3
    assert fork_client._server is not None and fork_client._server.launches == 2


def test_the_kernel_kills_a_trainer_before_the_flow_when_memory_runs_out(tmp_path: Path) -> None:
    preload()
    points: list[int] = []

    def look(_: object) -> None:
        if not points:
            points.append(int(Path(f"/proc/{trainer()}/oom_score_adj").read_text()))

    train(tmp_path / "job", look, steps=300)
    assert points[0] >= int(Path("/proc/self/oom_score_adj").read_text()) + 50


def test_a_fork_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    preload()
    seen: list[int] = []

    def stop(records: list[dict[str, Any]]) -> None:
        if not seen:  # it is told of the last ones, too
            seen.append(trainer())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "a", stop, steps=100_000)
    assert process_name(seen[0]) is None
    assert train(tmp_path / "b")["steps_completed"] == 3


def test_a_fork_dies_with_the_process_that_it_was_forked_from(tmp_path: Path) -> None:
    preload()
    assert fork_client._server is not None
    process = fork_client._server.process
    seen: list[int] = []

    def kill(records: list[dict[str, Any]]) -> None:
        if not seen:
            seen.append(trainer())
            assert parent_of(seen[0]) == process.pid
            process.kill()

    with pytest.raises(StageFailed, match="killed by SIGKILL"):
        train(tmp_path / "a", kill, steps=100_000)
    assert process_name(seen[0]) is None
    assert train(tmp_path / "b")["steps_completed"] == 3  # a process of its own
    preload()
    assert train(tmp_path / "c")["steps_completed"] == 3
    assert fork_client._server is not None and fork_client._server.launches == 1


def test_another_environment_needs_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preload()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert train(tmp_path / "a")["steps_completed"] == 3
    assert fork_client._server is not None and fork_client._server.launches == 0


def test_where_there_is_a_gpu_nothing_is_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(fork_client, "Path", lambda name: tmp_path)
    monkeypatch.setattr(fork_client, "_ACCELERATORS", ("nvidia[0-9]*",))
    with fork_client.fork_server():
        assert not fork_client._allowed
    assert fork_client._allowed


def test_the_log_of_a_fork_has_only_its_own_words(tmp_path: Path) -> None:
    preload()
    for name in "ab":
        train(tmp_path / name)
        assert "Traceback" not in (tmp_path / name / "work/trainer.log").read_text()
    assert json.loads((tmp_path / "b/work/memory.json").read_text())["peak_bytes"] > 0
