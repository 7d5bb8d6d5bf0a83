"""A sampling job over several endpoints: killed, resumed, with a dead endpoint; the shards are the same to the byte."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.config.jobs import SampleJob, SampleTask
from grpo.data.records import Problem, read_samples, write_rows
from grpo.distributed.process_group import Parallel
from grpo.generation.endpoint import EndpointEngine
from grpo.sampling import job as sampling_job
from grpo.sampling.shard import seed_of_name
from grpo.train import read_job
from tests.support.current_gpus import stand_in
from tests.support.job_runner import COMMAND, CPU, ENVIRONMENT, ROOT, user, wait_until, write_job
from tests.support.model_service import ModelService

PROBLEMS, PER_PROBLEM = 40, 4


@pytest.fixture
def services() -> Iterator[list[ModelService]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ModelService(seconds=0.02)) for _ in range(3)]


def job(folder: Path, services: list[ModelService]) -> Path:
    folder.mkdir()
    rows = [
        Problem(f"sum{i}", user(f"What is {i} + 1?"), str(i + 1), "number", "reasoning", "en", "sums")
        for i in range(PROBLEMS)
    ]
    write_rows(folder / "problems.parquet", rows, Problem)
    engine = {"kind": "endpoint", "urls": [service.url for service in services], "model": "m", "concurrency": 4}
    task = {
        "name": "sums",
        "model": "",
        "policy": "digest",
        "problems": [folder / "problems.parquet"],
        "samples_per_problem": PER_PROBLEM,
        "sampling": {"max_new_tokens": 10},
        "engine": engine,
    }
    return write_job(folder, "sample", tasks=[task], shard_size=8, hardware=CPU, scoring={"workers": 1})


def run_here(path: Path) -> None:
    """The job in this process, which has loaded torch already."""
    read = read_job(path)
    for folder in (read.out, read.state):
        folder.mkdir(exist_ok=True)
    sampling_job.run_sampling(read)


def seeds() -> Counter[int]:
    return Counter(
        (seed_of_name(0, f"sum{i}", 0) + number) % 2**31 for i in range(PROBLEMS) for number in range(PER_PROBLEM)
    )


def kept_of(folder: Path) -> int:
    """Completions in finished shards and in complete lines of journals."""
    lines = [line for path in folder.glob("*.journal") for line in path.read_text().split("\n")[:-1]]
    kept = sum(len(json.loads(line.partition(" ")[2]).get("completions", [])) for line in lines)
    return kept + (len(read_samples(folder)) if [*folder.glob("*.parquet")] else 0)


@pytest.mark.system
def test_killed_and_resumed_with_a_dead_endpoint_nothing_is_lost_or_double(services, tmp_path):
    undisturbed, killed = job(tmp_path / "undisturbed", services), job(tmp_path / "killed", services)
    run_here(undisturbed)
    assert Counter(seed for service in services for seed in service.seeds) == seeds()
    assert {s.engine for s in read_samples(tmp_path / "undisturbed/out/sums")} == {"m at a fleet of endpoints"}
    for service in services:
        service.seeds.clear()
    process = subprocess.Popen([*COMMAND, killed], cwd=ROOT, env=ENVIRONMENT)
    wait_until(lambda: sum(len(service.seeds) for service in services) > 80, timeout=300)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = kept_of(tmp_path / "killed/out/sums")
    assert 0 < kept < PROBLEMS * PER_PROBLEM
    wait_until(lambda: not any(service.at_once for service in services))
    for service in services:
        service.seeds.clear()
    services[0].fault = "close"
    run_here(killed)
    answered = Counter(seed for service in services for seed in service.seeds)
    # What the journals had is not sent again. A straggler may be answered twice.
    assert len(answered) == PROBLEMS * PER_PROBLEM - kept
    assert answered.keys() <= seeds().keys()
    for shard in (tmp_path / "undisturbed/out/sums").iterdir():
        assert (tmp_path / "killed/out/sums" / shard.name).read_bytes() == shard.read_bytes()
    assert {path.suffix for path in (tmp_path / "killed/out/sums").iterdir()} == {".parquet"}


def test_shards_overlap_at_endpoints_unless_a_reward_model_shares_the_process(services, tmp_path):
    task = SampleJob.model_validate_json(job(tmp_path / "job", services).read_text()).tasks[0]
    assert sampling_job._at_once(task) == 4
    assert sampling_job._at_once(task.model_copy(update={"helpful_model": "folder"})) == 1
    assert sampling_job._at_once(SampleTask.model_validate(task.model_dump() | {"engine": None})) == 1


def test_an_engine_gives_each_completion_its_seed_whoever_answers(services, tmp_path):
    task = SampleJob.model_validate_json(job(tmp_path / "job", services).read_text()).tasks[0]
    services[1].fault = 500
    engine = EndpointEngine(task.engine, "chat", None)
    problems = [Problem(f"p{i}", user("What is 1 + 1?"), "2", "number", "reasoning", "en", "sums") for i in range(10)]
    try:
        written = dict(engine.write(problems, 3, task.sampling, [100 * i for i in range(10)]))
    finally:
        engine.close()
    assert sorted(written) == [*range(10)]
    for index, texts in written.items():
        expected = [f"<think>\n{n}\n</think>\n<answer>{(100 * index + n) % 7}</answer>" for n in range(3)]
        assert [text.text for text in texts.texts] == expected
        assert texts.prompt_tokens == 7


def test_shards_are_made_on_the_gpu_of_the_process(
    services: list[ModelService], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judges load in the threads of the shards."""
    gpus, load, used = stand_in(monkeypatch), sampling_job.Worker._load, set[tuple[str, int]]()

    def watched(self: sampling_job.Worker, task: SampleTask) -> Any:
        used.add((threading.current_thread().name.partition("_")[0], gpus.number))
        return load(self, task)

    monkeypatch.setattr(sampling_job.Worker, "_load", watched)
    monkeypatch.setattr(Parallel, "start", lambda _: Parallel(0, 1, 1, torch.device("cuda", 1)))
    run_here(job(tmp_path / "job", services))
    assert used == {("shard", 1)}
