"""Runs that are ended or deleted for others."""

from __future__ import annotations

from pathlib import Path

from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.run_owner import START_TAG, delete_repeats, is_alive, owner_tags
from tasks.tracking.tags import PIDS_TAG, PROCESS_TAG


def test_a_process_in_another_container_may_be_alive() -> None:
    """In the host's network, containers have its name, and process numbers of their own."""
    tags = owner_tags()
    gone = tags | {PROCESS_TAG: "4194300 1"}
    assert is_alive(tags) and not is_alive(gone)
    assert is_alive(gone | {PIDS_TAG: "pid:[1]"})
    assert not is_alive({name: value for name, value in gone.items() if name != PIDS_TAG})  # of an earlier version


def test_runs_that_a_repeated_request_began_are_ended_and_deleted(tmp_path: Path) -> None:
    """MLflow leaves a deleted run its status: RUNNING would last."""
    tracking = Tracking(default_uri(tmp_path))
    first, second = (tracking.recipe_run("repeats", name, {}, {START_TAG: "t"}) for name in ("lost", "kept"))
    delete_repeats(tracking, "t", second)
    lost, kept = (tracking.client.get_run(run).info for run in (first, second))
    assert (lost.lifecycle_stage, lost.status) == ("deleted", "KILLED")
    assert (kept.lifecycle_stage, kept.status) == ("active", "RUNNING")
