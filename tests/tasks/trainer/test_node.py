"""Two machines on one trainer: two folders' worth of processes on this one, real torchrun, one rendezvous."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo.errors import InputError
from tasks.trainer import node as module
from tasks.trainer import rendezvous as rendezvous_module
from tasks.trainer.rendezvous import Rendezvous

ROOT = Path(__file__).parents[3]
SETTINGS = {
    "vocabulary": 300, "hidden": 32, "feed_forward": 64, "layers": 2, "heads": 2, "context": 128, "batch_size": 8,
    "steps": 6, "save_every": 2, "optimizer": {"learning_rate": 0.003},
}  # fmt: skip
FIRST = """
import json, sys
from pathlib import Path
from tasks.trainer import launch, process_group
from tasks.trainer.rendezvous import Rendezvous
process_group.GRACE_S = 2.0
rendezvous = Rendezvous.of_environment(Path({home!r}))
with rendezvous.lead():
    result = launch.launch(json.loads({job!r}), Path({work!r}), on_metrics=print, rendezvous=rendezvous)
    Path({work!r}, "published").write_text(json.dumps(result))
"""
OTHER = """
from pathlib import Path
from tasks.trainer.node import run_node
from tasks.trainer.rendezvous import Rendezvous
print("ready", flush=True)
raise SystemExit(run_node(Rendezvous.of_environment(Path({home!r}))))
"""


def endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


class Machines:
    """Both machines of a run, each one process that starts its own torchrun."""

    def __init__(self, folder: Path):
        self.home, self.work = folder / "home", folder / "work"
        self.place = endpoint()
        self.started: list[subprocess.Popen[str]] = []

    def start(self, rank: int, job: dict[str, Any]) -> subprocess.Popen[str]:
        source = (FIRST if rank == 0 else OTHER).format(home=str(self.home), work=str(self.work), job=json.dumps(job))
        own = {"PET_RDZV_ENDPOINT": self.place, "PET_NODE_RANK": str(rank), "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-c", source],
            env={**os.environ, **own, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def torchrun_of(self, process: subprocess.Popen[str]) -> int:
        """The process id of the torchrun that a machine started."""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def await_steps(self, count: int = 1) -> None:
        deadline, metrics = time.monotonic() + 120, self.work / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
            assert time.monotonic() < deadline and all(p.poll() is None for p in self.started)
            time.sleep(0.05)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    both = Machines(tmp_path)
    yield both
    for process in both.started:
        process.kill()
        process.communicate()


def job(folder: Path, steps: int = 6, **hardware: int) -> dict[str, Any]:
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.txt"
    corpus.write_text("\n\n".join(f"What is {a} + {b}? {a + b}" for a in range(20) for b in range(20)))
    places = {"out": work / "out", "state": work / "state", "metrics": work / "metrics.jsonl"}
    settings = {**SETTINGS, "steps": steps, "hardware": {"device": "cpu", **hardware}}
    fields = {**places, "result": work / "result.json", "corpus": corpus}
    return {"kind": "pretrain", "seed": 0, "settings": settings, **{name: str(path) for name, path in fields.items()}}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "work" / "out" / "model.safetensors")


@pytest.mark.slow
def test_two_machines_with_a_process_each_are_one_with_two(machines, tmp_path):
    told = job(tmp_path, nodes=2, processes=1)
    first, other = machines.start(0, told), machines.start(1, told)
    _, errors = first.communicate(timeout=240)
    assert first.returncode == 0, errors
    assert json.loads((machines.work / "published").read_text())["steps_completed"] == 6
    assert [json.loads(line)["step"] for line in (machines.work / "metrics.jsonl").read_text().splitlines()] == [
        1, 2, 3, 4, 5, 6
    ]  # fmt: skip
    _, said = other.communicate(timeout=60)
    assert other.returncode == 0, said
    assert said.splitlines()[0] == f"machine 1: joins {machines.work / 'job.json'}"

    alone = job(tmp_path / "alone", processes=2)
    place = tmp_path / "alone" / "work"
    subprocess.run(
        [sys.executable, "-c", FIRST.format(home=str(tmp_path / "h"), work=str(place), job=json.dumps(alone))],
        env={**os.environ, "PET_RDZV_ENDPOINT": endpoint(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    one, two = weights(tmp_path / "alone"), weights(tmp_path)
    assert one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "words"),
    [
        (0, "nothing answers at .*: the machine that it names is gone"),
        # Which of the two is said first depends on who notices first.
        (1, "a process on another machine is gone; the trainer's log there says why|nothing answers at .* is gone"),
    ],
)
def test_the_end_of_one_machines_torchrun_ends_the_other(machines, tmp_path, killed, words):
    told = job(tmp_path, steps=100_000, nodes=2, processes=1)
    both = [machines.start(0, told), machines.start(1, told)]
    machines.await_steps()
    began = time.monotonic()
    os.kill(machines.torchrun_of(both[killed]), signal.SIGKILL)
    said = [process.communicate(timeout=60)[1] for process in both]
    assert time.monotonic() - began < 60
    assert [process.returncode for process in both] == [1, 1]
    assert not (machines.work / "published").exists()
    # The one that was killed says so, the other one that it lost a machine.
    last = [text.strip().splitlines()[-1] for text in said]
    assert "killed by SIGKILL" in last[killed]
    assert re.search(words, last[1 - killed])


@pytest.mark.slow
def test_what_is_left_after_a_lost_machine_goes_on(machines, tmp_path):
    """The same folders and settings, but for `nodes`."""
    steps = 300
    told = job(tmp_path, steps=steps, nodes=2, processes=1)
    first, other = machines.start(0, told), machines.start(1, told)
    machines.await_steps(5)
    other.kill()
    os.kill(machines.torchrun_of(other), signal.SIGKILL)
    first.communicate(timeout=60)
    assert first.returncode == 1
    metrics = machines.work / "metrics.jsonl"
    before = metrics.read_text().splitlines()
    assert 5 <= len(before) < steps

    _, errors = (left := machines.start(0, job(tmp_path, steps=steps, nodes=1, processes=1))).communicate(timeout=240)
    assert left.returncode == 0, errors
    assert json.loads((machines.work / "published").read_text())["steps_completed"] == steps
    after = metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in after] == [*range(1, steps + 1)]
    # A checkpoint is written every two steps: what was logged up to it is not computed again.
    assert after[: len(before) - 3] == before[:-3]


@pytest.mark.slow
def test_the_first_machine_killed_ends_the_others(machines, tmp_path):
    told = job(tmp_path, steps=100_000, nodes=2, processes=1)
    first, other = machines.start(0, told), machines.start(1, told)
    machines.await_steps()
    os.kill(first.pid, signal.SIGKILL)
    _, said = other.communicate(timeout=60)
    assert other.returncode == 1 and "machine 1: " in said


def test_the_others_go_home_with_the_first(machines, tmp_path):
    """A run whose stages all exist already starts no trainer."""
    rendezvous = Rendezvous.of_environment(machines.home, {"PET_RDZV_ENDPOINT": machines.place, "PET_NODE_RANK": "0"})
    assert rendezvous is not None
    with rendezvous.lead():
        other = machines.start(1, {})
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        time.sleep(2)
        assert other.poll() is None
    assert other.wait(timeout=120) == 0


def test_without_a_first_machine_the_others_give_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.6)
    rendezvous = Rendezvous(tmp_path, "node0:29500", 1)
    with pytest.raises(InputError, match=r"^no first machine at node0:29500 for 0.6 s .* PET_NODE_RANK=0 and the same"):
        module.run_node(rendezvous)


def test_two_first_machines_do_not_mix(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous_module, "_PATIENCE_S", 0.3)
    rendezvous = Rendezvous(tmp_path, "node0:29500", 0)
    with rendezvous.lead(), pytest.raises(InputError, match="another run meets at node0:29500"), rendezvous.lead():
        pass
    with rendezvous.lead():
        pass


def test_what_a_killed_run_announced_is_forgotten(tmp_path):
    rendezvous = Rendezvous(tmp_path, "node0:29500", 0)
    with rendezvous.lead(), rendezvous.announce(tmp_path / "job.json") as environment:
        told = rendezvous.announcement()
        assert told is not None and told.job == str(tmp_path / "job.json")
        assert environment == {"PET_RDZV_ID": told.id}
        record = (tmp_path / "trainer.json").read_text()
    assert rendezvous.announcement() is None
    (tmp_path / "trainer.json").write_text(record)
    with rendezvous.lead():
        assert rendezvous.announcement() is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PET_RDZV_ENDPOINT": "node0"}, "PET_RDZV_ENDPOINT is 'node0'; write HOST:PORT"),
        ({"PET_RDZV_ENDPOINT": "node0:1", "PET_NODE_RANK": "first"}, "PET_NODE_RANK is 'first'; number the machines"),
    ],
)
def test_wrong_variables_are_named(tmp_path, environment, words):
    with pytest.raises(InputError, match=words):
        Rendezvous.of_environment(tmp_path, environment)


def test_one_machine_has_nobody_to_meet(tmp_path):
    assert Rendezvous.of_environment(tmp_path, {}) is None
