"""Cost and judge counts of a sampling job that was stopped and resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo.config.jobs import SampleJob, SampleTask
from grpo.data.records import Problem, write_rows
from grpo.processes.metrics_log import Metrics
from grpo.sampling import progress
from grpo.sampling.progress import Place, Progress, Window
from grpo.sampling.shard import SampledProblem
from tests.support.faulty_endpoint import FaultyEndpoint
from tests.support.job_runner import CPU, metrics, result, run, user, write_job


@pytest.fixture
def judge() -> Iterator[FaultyEndpoint]:
    """Cannot tell about the fifth answer, and refuses the sixth question, once."""

    def plan(number: int, _: dict[str, Any]) -> str:
        return {4: "{}", 5: "401"}.get(number, '{"analysis": "", "correctness": "correct"}')

    running = FaultyEndpoint(plan)
    yield running
    running.close()


def job(folder: Path, endpoint: FaultyEndpoint) -> Path:
    """Six problems in three shards; the judge is asked about each."""
    folder.mkdir()
    rows = [Problem(f"p{i}", user(f"What is {i}?"), str(i), "judge", "reasoning", "en", "sums") for i in range(6)]
    write_rows(folder / "problems.parquet", rows, Problem)
    task = {
        "name": "sums",
        "model": "",
        "policy": "digest",
        "problems": [folder / "problems.parquet"],
        "samples_per_problem": 1,
        "sampling": {"max_new_tokens": 10},
        "engine": {"kind": "function", "function": "tests.support.user_engines:adder"},
    }
    asked = {"kind": "openai", "base_url": endpoint.url, "model": "m", "concurrency": 1, "ask_again": False}
    return write_job(
        folder, "sample", tasks=[task], shard_size=2, hardware=CPU, scoring={"workers": 1}, judge={**asked, "votes": 1}
    )


@pytest.mark.system
def test_counts_of_all_attempts_are_added(judge: FaultyEndpoint, tmp_path: Path) -> None:
    """Two shards and a half before the stop; a completion has 20 tokens, its prompt 7. The answer that the judge cannot
    tell about is in the third, and is scored again."""
    path = job(tmp_path / "stopped", judge)
    assert "refused with status 401" in run(path, expected=2).stderr
    before = json.loads((tmp_path / "stopped" / "state" / "spent-0.json").read_text())
    assert before["tokens"] == 5 * 27
    run(path)
    judged = result(path.parent)["judge"]
    assert (judged["items"], judged["items/undecided"]) == (6, 1)
    assert result(path.parent)["engine_s"] > before["engine_s"] > 0
    assert metrics(path.parent)[-1]["tokens_so_far"] == 6 * 27


def test_groups_of_an_earlier_attempt_are_not_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name: tmp_path / name for name in ("out", "state", "metrics", "result")}
    fields = {"tasks": [], "hardware": CPU, "seed": 0, **names}
    counted = Progress(
        SampleJob.model_validate(fields), places(tmp_path), Metrics(names["metrics"]), 1, tmp_path / "spent"
    )
    monkeypatch.setattr(progress, "_LOG_S", -1.0)  # a line for each
    group = SampledProblem("p", 0, completions=[("text", 30, True)], rewards=[{}], failures={"kinds": {}})
    counted.add(group, "scored")
    counted.add(group)
    (line,) = [json.loads(line) for line in names["metrics"].read_text().splitlines()]
    assert (line["step"], line["samples"], line["tokens_so_far"]) == (2, 1, 30)


def test_what_nobody_counted_is_counted(tmp_path: Path) -> None:
    """Actors keep no counts: those of one that was killed are lost, and what it journaled is counted by the next."""
    names = {name: tmp_path / name for name in ("out", "state", "metrics", "result")}
    job = SampleJob.model_validate({"tasks": [], "hardware": CPU, "seed": 0, **names})
    group = SampledProblem("p", 0, completions=[("text", 30, True)], rewards=[{}], failures={"kinds": {}})
    group.judged = {"items": 1, "items/undecided": 1}
    kept, none_kept = (Progress(job, places(tmp_path), None, 1, spent) for spent in (tmp_path / "spent", None))
    for counted in (kept, none_kept):
        counted.add(group, "scored", {"items": 1})
    assert (kept.tokens, none_kept.tokens) == (0, 30)
    assert (+kept.judge, none_kept.judge) == ({"items/undecided": 1}, group.judged)


def test_a_worker_without_metrics_looks_at_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(type(tmp_path)):  # type: ignore[misc]
        def exists(self, **_: Any) -> bool:
            raise AssertionError("looked")

    names = {name: tmp_path / name for name in ("out", "state", "metrics", "result")}
    fields = {"tasks": [], "hardware": CPU, "seed": 0, **names}
    counted = Progress(SampleJob.model_validate(fields), places(Watched(tmp_path)), None, 1)
    monkeypatch.setattr(progress, "_LOG_S", -1.0)
    counted.merge(Window(samples=1, problems=1))
    counted.log(last=True)


def places(folder: Path) -> list[Place]:
    return [Place(SampleTask.model_construct(name="sums"), n, n + 1, folder / str(n)) for n in range(3)]
