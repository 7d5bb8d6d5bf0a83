"""Runs that are ended or deleted for others."""

from __future__ import annotations

from pathlib import Path

from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.run_owner import START_TAG, delete_repeats


def test_runs_that_a_repeated_request_began_are_ended_and_deleted(tmp_path: Path) -> None:
    """MLflow leaves a deleted run its status: RUNNING would last."""
    tracking = Tracking(default_uri(tmp_path))
    first, second = (tracking.recipe_run("repeats", name, {}, {START_TAG: "t"}) for name in ("lost", "kept"))
    delete_repeats(tracking, "t", second)
    lost, kept = (tracking.client.get_run(run).info for run in (first, second))
    assert (lost.lifecycle_stage, lost.status) == ("deleted", "KILLED")
    assert (kept.lifecycle_stage, kept.status) == ("active", "RUNNING")
