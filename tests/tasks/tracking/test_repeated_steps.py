"""Steps that a trainer does again after it went back to a checkpoint: their curves and completions in a real MLflow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from grpo.processes.metrics_log import COMPLETIONS, Metrics
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.results import CompletionsTable
from tasks.trainer.launch import _MetricsTail, read_metrics


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return default_uri(tmp_path_factory.mktemp("home"))


@pytest.fixture
def record(uri: str) -> Tracking:
    return Tracking(uri)


@pytest.fixture
def run(record: Tracking) -> str:
    return record.stage_run(None, "tiny", "rl", {}, {})


def losses(values: dict[int, float]) -> list[dict[str, Any]]:
    return [{"step": step, "loss": value} for step, value in values.items()]


def points(record: Tracking, run: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in record.client.get_metric_history(run, "loss")]


def test_steps_after_a_rollback_replace_those_of_the_bad_attempt(record: Tracking, run: str) -> None:
    record.log_metrics(run, losses({1: 3.0, 2: 2.0, 3: math.nan, 4: math.inf}))  # MLflow gets NaN for both
    record.log_metrics(run, losses({1: 3.0, 2: 2.0, 3: 1.75}))  # the whole file again, from its first record
    assert record.reader.curve(run, "loss")[:3] == [(1, 3.0), (2, 2.0), (3, 1.75)]
    record.log_metrics(run, losses({4: 1.5, 5: 1.25}))
    assert record.reader.curve(run, "loss") == [(1, 3.0), (2, 2.0), (3, 1.75), (4, 1.5), (5, 1.25)]
    assert len(points(record, run)) == 7, "five steps, two of them twice"


def test_equal_values_are_not_logged_again(record: Tracking, run: str) -> None:
    for _ in range(2):
        record.log_metrics(run, losses({1: 3.0, 2: math.nan, 3: 1.0}))
    assert [step for step, _ in points(record, run)] == [1, 2, 3]


def test_a_run_that_another_process_began_is_compared_with_what_mlflow_has(
    record: Tracking, run: str, uri: str
) -> None:
    record.log_metrics(run, losses({1: 3.0, 2: 9.0, 3: 2.0}))
    record.log_metrics(run, losses({2: 2.5}))
    other = Tracking(uri)
    other.reopen(run)
    other.log_metrics(run, losses({1: 3.0, 2: 2.5, 3: 1.5}))
    assert points(record, run) == [(1, 3.0), (2, 9.0), (3, 2.0), (2, 2.5), (3, 1.5)]


def sample(metrics: Metrics, *steps: int, text: str = "first") -> None:
    for step in steps:
        metrics.log(step, 60, completion=f"{text} {step}")


def completions(record: Tracking, run: str) -> list[str]:
    data = record.reader.read_json(run, "completions.json")["data"]
    return [completion for _, completion in data]


def test_a_resumed_trainers_completions_are_in_the_table_once(record: Tracking, run: str, tmp_path: Path) -> None:
    """Killed at 45 with a checkpoint at 30 and samples every 20 steps."""
    path = tmp_path / COMPLETIONS
    sample(Metrics(path), 0, 20, 40)
    table, tail = CompletionsTable(record, run, "completions"), _MetricsTail(path)
    table.add(read_metrics(path))
    assert completions(record, run) == ["first 0", "first 20", "first 40"]
    resumed = Metrics(path, 30)  # drops what came after its checkpoint
    table.add(tail.read(), tail.anew)
    assert completions(record, run) == ["first 0", "first 20"]
    sample(resumed, 40, text="second")
    table.add(tail.read(), tail.anew)
    assert completions(record, run) == ["first 0", "first 20", "second 40"]


def test_a_trainer_without_a_checkpoint_begins_the_table_again(record: Tracking, run: str, tmp_path: Path) -> None:
    path = tmp_path / COMPLETIONS
    sample(Metrics(path), 0)
    table, tail = CompletionsTable(record, run, "completions"), _MetricsTail(path)
    table.add(read_metrics(path))
    again = Metrics(path, -1)
    assert (tail.read(), tail.anew) == ([], True)
    table.add([], True)
    sample(again, 0, text="second")
    table.add(tail.read(), tail.anew)
    assert completions(record, run) == ["second 0"]


def test_a_file_that_was_replaced_and_has_grown_beyond_the_old_one_is_read_anew(tmp_path: Path) -> None:
    """A fast trainer goes back and passes the old step between two looks at its file."""
    path = tmp_path / "metrics.jsonl"
    tail = _MetricsTail(path)
    sample(Metrics(path), 1, 2, 3)
    assert ([record["step"] for record in tail.read()], tail.anew) == ([1, 2, 3], False)
    sample(Metrics(path, 1), 2, 3, 4, text="second")
    assert [record["completion"] for record in tail.read()] == ["first 1", "second 2", "second 3", "second 4"]
    assert tail.anew
    assert (tail.read(), tail.anew) == ([], False)
