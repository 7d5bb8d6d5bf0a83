"""Attempts at one key, by `--force`, in a real store and a real MLflow store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.report.compare import stages
from tasks.store.manifest import artifact_key
from tasks.store.store import Store
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.recipe_run import RecipeRun, load_run
from tasks.tracking.tags import DIGEST_TAG, KEY_TAG, STAGE_TAG, STATUS_TAG

KEY = artifact_key("sft", 1, {}, {})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def record(tmp_path: Path) -> Tracking:
    return Tracking(default_uri(tmp_path))


def forced(store: Store, record: Tracking, weights: str, seconds: float) -> str:
    """A recipe run that made the stage sft again. Returns its id."""
    run = record.recipe_run("r", "run", {}, {})
    stage = record.stage_run(run, "r", "sft", {}, {STAGE_TAG: "sft", KEY_TAG: KEY, STATUS_TAG: "ran"})
    with store.attempt("sft", KEY, force=True) as attempt:
        (attempt.out / "weights").write_text(weights)
        made = attempt.publish(stage_version=1, config={}, mlflow_run_id=stage, seconds=seconds)
    record.set_tags(stage, {DIGEST_TAG: made.digest})
    for each in (stage, run):
        record.finish(each, "FINISHED")
    return run


def load(store: Store, record: Tracking, run_id: str) -> RecipeRun:
    run = record.reader.run(run_id)
    assert run is not None
    return load_run(record.reader, store, run)


def test_an_attempt_that_made_the_same_is_shared_and_has_its_own_time(store: Store, record: Tracking) -> None:
    ids = [forced(store, record, "the same", seconds) for seconds in (7.0, 9.0)]
    first, second = (load(store, record, run_id) for run_id in ids)
    assert first.manifests["sft"].digest == second.manifests["sft"].digest
    (row,) = stages([first, second])
    assert row["shared"] and row["seconds"] == [7.0, 9.0] and row["why"] == [[], []]


def test_an_attempt_that_made_something_else_is_another_artifact(store: Store, record: Tracking) -> None:
    runs = [load(store, record, forced(store, record, weights, 7.0)) for weights in ("a", "b")]
    (row,) = stages(runs)
    assert row["keys"] == [KEY, KEY] and not row["shared"]
    assert row["why"] == [[], ["another attempt at the same key"]]
