"""Processes share the shards of step labels: each takes the next free one, and nobody waits for long in a barrier."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from grpo.config.jobs import StepLabelsJob
from grpo.data.records import Problem, Sample, write_rows
from grpo.distributed.process_group import Parallel
from grpo.sampling.journal import Journal
from grpo.train import read_job
from grpo.training import step_labels
from tests.support.job_runner import metrics, result, user, wait_until, write_job

CHAINS = 5


@pytest.fixture
def job(tmp_path: Path) -> StepLabelsJob:
    """Five chains of one step, in a shard each."""
    problems = [Problem(f"p{i}", user(f"{i}?"), "3", "number", "reasoning", "en", "test") for i in range(CHAINS)]
    rest = {"policy": "x", "reasoning": "", "summary": "", "answer": "", "rewards": {}, "tokens": 1}
    rest |= {"finish_reason": "stop", "domain": "reasoning", "language": "en"}
    text = "<think>\nadd\n</think>\n<answer>3</answer>"
    write_rows(tmp_path / "problems.parquet", problems, Problem)
    write_rows(
        tmp_path / "samples.parquet", [Sample(problem_id=p.id, completion=text, **rest) for p in problems], Sample
    )
    given = {
        "model": "none",
        "problems": [tmp_path / "problems.parquet"],
        "samples": tmp_path / "samples.parquet",
        "rollouts": 4,
        "sampling": {"max_new_tokens": 8},
        "shard_chains": 1,
    }
    read = read_job(write_job(tmp_path, "step_labels", **given))
    assert isinstance(read, StepLabelsJob)
    for folder in (read.out, read.state):
        folder.mkdir()
    return read


class Processes:
    """Two processes of the job as threads, whose labels say that three of four rollouts are right."""

    def __init__(self, job: StepLabelsJob, monkeypatch: pytest.MonkeyPatch):
        self.job, self.rank = job, threading.local()
        self.made: list[list[str]] = [[], []]
        self.shards_in_barrier: dict[int, list[str]] = {}
        self.first_of_rank_0 = threading.Event()  # rank 0 labels its first shard until then
        self.first_of_rank_0.set()
        processes = self

        class Labeller:
            def __init__(self, job):
                pass

            def __call__(self, chains):
                rank = processes.rank.number
                processes.made[rank].append(chains[0].problem.id)
                if rank == 0:
                    assert processes.first_of_rank_0.wait(20)
                return [step_labels.label_row(chain, [3], 4, 0.5) for chain in chains]

            def close(self):
                pass

        monkeypatch.setattr(step_labels, "Labeller", Labeller)
        monkeypatch.setattr(Parallel, "start", lambda hardware: Parallel(self.rank.number, 2, 0, torch.device("cpu")))
        monkeypatch.setattr(Parallel, "barrier", lambda parallel: self._barrier(parallel.rank))

    def _barrier(self, rank: int) -> None:
        """Records which shards exist; if all did, those who are here already would not have to wait."""
        self.shards_in_barrier[rank] = self.shards()

    def shards(self) -> list[str]:
        return sorted(path.name for path in self.job.out.iterdir())

    def start(self, rank: int) -> threading.Thread:
        def run() -> None:
            self.rank.number = rank
            step_labels.run_step_labels(self.job)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


EVERY = [f"labels-{number:05d}.parquet" for number in range(CHAINS)]


def test_a_slow_shard_holds_nobody_in_the_barrier(job, monkeypatch):
    """While rank 0 labels its first shard, rank 1 makes the other four, and then waits outside the barrier."""
    processes = Processes(job, monkeypatch)
    processes.first_of_rank_0.clear()
    main = processes.start(0)
    wait_until(lambda: processes.made[0] == ["p0"])
    other = processes.start(1)
    wait_until(lambda: len(processes.shards()) == 4 or not other.is_alive())
    other.join(1)  # it has nothing left to make
    assert processes.made == [["p0"], ["p1", "p2", "p3", "p4"]]
    assert processes.shards_in_barrier == {}
    processes.first_of_rank_0.set()
    for thread in (main, other):
        thread.join(20)
    assert processes.shards_in_barrier == {0: EVERY, 1: EVERY}
    assert [*job.state.iterdir()] == []
    assert result(job.out.parent)["counts"] == {"chains": 5, "steps": 5}
    assert result(job.out.parent)["metrics"] == {"hard": 1, "soft": 0.75}
    assert metrics(job.out.parent)[-1] == {"step": 5, "of": 5, "hard": 1, "soft": 0.75}


def test_the_shard_of_a_killed_process_is_taken_over(job, monkeypatch):
    processes = Processes(job, monkeypatch)
    killed = Journal(job.state / "labels-00001.lock")
    main = processes.start(0)
    wait_until(lambda: len(processes.shards()) == 4 or not main.is_alive())
    assert (main.is_alive(), processes.made[0]) == (True, ["p0", "p2", "p3", "p4"])
    killed.close()  # as the system does
    main.join(20)
    assert processes.made[0][-1] == "p1"
    assert processes.shards_in_barrier == {0: EVERY}
    (row,) = pq.read_table(job.out / EVERY[1]).to_pylist()
    assert (row["problem_id"], row["right"]) == ("p1", [3])
    assert [record["step"] for record in metrics(job.out.parent)] == [1, 2, 3, 4, 5]


def test_what_exists_is_not_made_again_and_counts_in_the_metrics(job, monkeypatch):
    processes = Processes(job, monkeypatch)
    processes.start(0).join(20)
    (job.out / EVERY[3]).unlink()
    again = Processes(job, monkeypatch)
    again.start(0).join(20)
    assert again.made[0] == ["p3"]
    assert [record["step"] for record in metrics(job.out.parent)] == [5]
