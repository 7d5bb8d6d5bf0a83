"""Final numbers of stages and scores of models in a real MLflow store."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.store.manifest import Manifest
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.results import CompletionsTable, log_results, log_scores
from tasks.tracking.system_metrics import system_metrics


def manifest(stage: str, digest: str, metrics: dict[str, float | None] | None = None) -> Manifest:
    return Manifest(
        stage=stage, stage_version=1, key="cd" * 32, digest=digest * 32, attempt=1, created="2026-01-01T00:00:00+00:00",
        seconds=1.0, config={}, inputs={}, files={}, metrics=metrics or {}, path=Path("/store") / stage,
    )  # fmt: skip


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Tracking:
    return Tracking(default_uri(tmp_path_factory.mktemp("home")))


def test_final_numbers_are_bars_and_curves_are_not_repeated(record: Tracking) -> None:
    run = record.stage_run(None, "tiny", "rl", {}, {})
    record.log_metrics(run, [{"step": step, "reward": step / 2} for step in (1, 2)])
    made = manifest("rl", "aa", {"reward": 0.7, "kept/pass@1": 0.5, "missing": None})
    log_results(record, run, made, {}, "| Number | Value |\n|---|---:|\n| reward | 0.7 |")
    found = record.client.get_run(run)
    assert found.data.metrics == {"reward": 1.0, "kept_pass_at_1": 0.5}
    # Only a metric whose steps are all 0 is drawn as a bar.
    assert [point.step for point in record.client.get_metric_history(run, "kept_pass_at_1")] == [0]
    assert "| reward | 0.7 |" in found.data.tags["mlflow.note.content"]


def test_completions_are_added_to_a_table_with_rewards_by_name(record: Tracking) -> None:
    run = record.stage_run(None, "tiny", "rl", {}, {})
    row = {"step": 0, "of": 9, "problem": "1 + 1", "gold": "2", "completion": "x" * 9999, "reward": 1.0, "accuracy": 1}
    completions = CompletionsTable(record, run, "completions")
    completions.add([row])
    completions.add([])
    completions.add([{**row, "step": 5, "completion": "007", "format": 0.5}])
    table = record.reader.read_json(run, "completions.json")
    assert table["columns"] == [
        "step", "prompt", "gold", "completion", "reward", "reward_accuracy", "reward_format"
    ]  # fmt: skip
    (first, second) = table["data"]
    assert first == [0, "1 + 1", "2", "x" * 4000, 1.0, 1, None]
    assert second == [5, "1 + 1", "2", "007", 1.0, 1, 0.5]
    tag = record.client.get_run(run).data.tags["mlflow.loggedArtifacts"]
    assert json.loads(tag) == [{"path": "completions.json", "type": "table"}]


@contextlib.contextmanager
def outage(record: Tracking) -> Iterator[None]:
    """Neither runs nor files can be written."""
    files = record.sqlite.parent / "mlartifacts"
    with contextlib.closing(sqlite3.connect(record.sqlite, isolation_level=None)) as database:
        database.execute("ALTER TABLE runs RENAME TO runs_away")
        files.rename(files.with_name("away"))
        files.touch()
        yield
        files.unlink()
        files.with_name("away").rename(files)
        database.execute("ALTER TABLE runs_away RENAME TO runs")


@pytest.mark.parametrize("missed", [1, 2])
def test_a_table_is_whole_after_an_outage(record: Tracking, missed: int) -> None:
    run = record.stage_run(None, "tiny", "rl", {}, {})
    completions = CompletionsTable(record, run, "completions")
    for step in range(1, missed + 2):
        with outage(record) if step == missed else contextlib.nullcontext():
            completions.add([{"step": step}])
    assert record.reader.read_json(run, "completions.json")["data"] == [[1], [2], [3]][: missed + 1]
    assert record.outbox.pending == []


def test_a_table_that_is_sent_twice_has_its_rows_once(record: Tracking) -> None:
    run = record.stage_run(None, "tiny", "rl", {}, {})
    for _ in range(2):
        record.log_table(run, "checkpoints", [{"name": "r1", "score": float("nan")}])
    assert record.reader.read_json(run, "checkpoints.json")["data"] == [["r1", None]]


def test_tags_that_waited_do_not_replace_newer_ones(record: Tracking) -> None:
    run = record.stage_run(None, "tiny", "rl", {}, {"failed": "sft"})
    with outage(record):
        record.set_tags(run, {"status": "old"})
        record.delete_tag(run, "failed")
    record.set_tags(run, {"status": "new", "failed": "rl"})
    tags = record.client.get_run(run).data.tags
    assert (tags["status"], tags["failed"]) == ("new", "rl") and record.outbox.pending == []


def test_the_machine_is_watched_while_a_stage_runs(
    record: Tracking, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    run = record.stage_run(None, "tiny", "rl", {}, {})

    def watched() -> set[str]:
        return {name for name in record.client.get_run(run).data.metrics if name.startswith("system/")}

    with system_metrics(record, run):
        deadline = time.monotonic() + 60
        while len(record.client.get_metric_history(run, "system/cpu_utilization_percentage")) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"} <= watched()
    seen = len(record.client.get_metric_history(run, "system/cpu_utilization_percentage"))
    time.sleep(0.5)
    assert len(record.client.get_metric_history(run, "system/cpu_utilization_percentage")) == seen
    assert capfd.readouterr() == ("", "")


def test_a_stage_that_fails_ends_the_watch_with_its_run(record: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    before = {thread for thread in threading.enumerate() if thread.name == "SystemMetricsMonitor"}
    run = record.stage_run(None, "tiny", "rl", {}, {})
    with pytest.raises(RuntimeError), system_metrics(record, run):
        raise RuntimeError
    record.finish(run, "FAILED")
    deadline = time.monotonic() + 60
    while {thread for thread in threading.enumerate() if thread.name == "SystemMetricsMonitor"} - before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_models_are_ranked_by_what_an_evaluation_found(record: Tracking) -> None:
    scores = {"dev1": 0.25, "dev2": 0.75, "r1": 0.5}
    stages = {"cold_start_sft": "dev1", "reasoning_rl": "dev2", "alignment_rl": "r1"}
    made = {stage: manifest(stage, digest) for stage, digest in zip(stages, ("a1", "a2", "a3"), strict=True)}
    ids = {}
    for stage, name in stages.items():
        ids[name] = record.models.log(record.stage_run(None, "ranked", stage, {}, {}), made[stage], name, 1)
    problems = manifest("problems", "b0")
    run = record.stage_run(None, "ranked", "evaluate", {}, {})
    record.log_dataset(run, problems, "problems", "input")
    found = manifest("evaluate", "c0", {f"{name}/pass@1": value for name, value in scores.items()} | {"judged": 1.0})
    log_results(record, run, found, stages, "")
    log_scores(record, run, found, stages, {**made, "problems": problems}, data="problems")

    ranked = record.client.search_logged_models(
        [record.client.get_run(run).info.experiment_id],
        order_by=[{"field_name": "metrics.pass_at_1", "ascending": False}],
    )
    assert [model.model_id for model in ranked] == [ids["dev2"], ids["r1"], ids["dev1"]]
    (metric,) = ranked[0].metrics
    assert (metric.value, metric.dataset_name, metric.dataset_digest) == (0.75, "problems", problems.digest[:36])
    better = record.client.search_logged_models(
        [record.client.get_run(run).info.experiment_id],
        filter_string="metrics.pass_at_1 > 0.4",
        datasets=[{"dataset_name": "problems", "dataset_digest": problems.digest[:36]}],
    )
    assert {model.model_id for model in better} == {ids["dev2"], ids["r1"]}
    metrics = record.client.get_run(run).data.metrics
    assert metrics == {"judged": 1.0, "pass_at_1": 0.5} | {f"pass_at_1/{name}": value for name, value in scores.items()}
    curve = record.client.get_metric_history(run, "pass_at_1")
    assert [(point.step, point.value) for point in curve] == [(0, 0.25), (1, 0.75), (2, 0.5)]
