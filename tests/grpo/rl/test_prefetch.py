"""Rollouts that are sampled ahead: on which GPU, and who waits for whom."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo.distributed.process_group import Parallel
from grpo.rl.collector import RolloutCollector
from grpo.rl.prefetch import Prefetcher
from grpo.train import read_job
from tests.support.current_gpus import stand_in
from tests.support.job_runner import RL, write_job


def test_the_thread_that_samples_ahead_uses_the_gpu_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, used = stand_in(monkeypatch), []

    def sample(*_: Any, **__: Any) -> Iterator[Any]:
        used.append((threading.current_thread() is threading.main_thread(), gpus.number))
        yield from ()

    engine: Any = SimpleNamespace(sample=sample, wake=lambda: None, version=lambda: -1, sleep=lambda: None)
    policy: Any = SimpleNamespace(sampler_version=-1)
    job: Any = read_job(write_job(tmp_path, "rl", settings=RL, model="m", problems=["problems.parquet"]))
    second = Parallel(1, 2, 1, torch.device("cuda", 1))
    gpus.set_device(second.device)  # as `Parallel.start` does in the main thread
    prefetcher = Prefetcher(job, engine, policy, None, None, second)  # type: ignore[arg-type]
    for background in (False, True):
        assert prefetcher.sample([], 0, (), background=background).results.result(10) == {}
    assert used == [(True, 1), (False, 1)]


def test_all_processes_wait_for_each_others_rollout_ahead() -> None:
    """One that went on would send weights, which pauses a shared vLLM server under the other's requests."""
    results, everyone, left = [Future[None](), Future[None]()], threading.Barrier(2), []

    def wait(rank: int) -> None:
        ahead = SimpleNamespace(results=results[rank])
        collector: Any = SimpleNamespace(prefetched=ahead, parallel=SimpleNamespace(barrier=everyone.wait))
        RolloutCollector.wait(collector)
        left.append(rank)

    processes = [threading.Thread(target=wait, args=(rank,), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    results[0].set_result(None)
    processes[0].join(0.5)
    assert not left
    results[1].set_result(None)
    for process in processes:
        process.join(10)
    assert sorted(left) == [0, 1]
