"""Lines of metrics of a sampling job whose shards other workers make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo.config.jobs import SampleJob, SampleTask
from grpo.processes.metrics_log import Metrics
from grpo.sampling import progress
from grpo.sampling.progress import Place, Progress, Window


def test_counts_that_arrive_after_the_last_shard_exists_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Ray, whose workers write the files, and send the counts afterwards."""
    monkeypatch.setattr(progress, "_LOG_S", -1.0)  # a line for each
    task = SampleTask.model_construct(name="sums")
    places = [Place(task, 8 * n, 8 * n + 8, tmp_path / str(n)) for n in range(3)]
    names = {name: tmp_path / name for name in ("out", "state", "metrics", "result")}
    job = SampleJob.model_validate({"tasks": [], "shard_size": 8, "hardware": {"device": "cpu"}, "seed": 0, **names})
    counted = Progress(job, places, Metrics(names["metrics"]), 1)
    for place in places:
        place.path.touch()
    for _ in places:
        counted.merge(Window(samples=16, tokens=160, spent=200, problems=8))
    counted.log(last=True)
    lines = [json.loads(line) for line in names["metrics"].read_text().splitlines()]
    assert [line["step"] for line in lines] == [23, 24]
    assert [line["tokens_so_far"] for line in lines] == [200, 600]
    assert sum(line["samples"] for line in lines) == 48
