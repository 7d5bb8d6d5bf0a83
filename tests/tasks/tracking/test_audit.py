"""What `r1 verify` finds in a real MLflow store in a sqlite file."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tasks.store.manifest import Manifest, artifact_key
from tasks.store.store import Store
from tasks.tracking.audit import audit_tracking, digests_in_use, old_runs, promoted, recipe_is_alive
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.tags import DIGEST_TAG, FLOW_RUN_TAG, WAITING_TAG

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def record(home: Path) -> Tracking:
    return Tracking(default_uri(home))


def publish(home: Path, stage: str) -> Manifest:
    with Store(home).attempt(stage, artifact_key(stage, 1, {}, {})) as attempt:
        (attempt.out / "weights").write_text(stage)
        return attempt.publish(stage_version=1, config={})


def test_a_run_without_a_process_is_found_and_ended(home: Path, record: Tracking) -> None:
    mine = record.recipe_run("tiny", "mine", {}, {FLOW_RUN_TAG: "f-mine"})
    code = (
        "import os, sys\nfrom tasks.tracking.client import Tracking\n"
        "print(Tracking(sys.argv[1]).recipe_run('tiny', 'killed', {}, {'r1flow.flow_run': 'f-dead'}), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, record.uri], cwd=ROOT, capture_output=True, text=True)
    dead = killed.stdout.strip()
    (finding,) = audit_tracking(record, set())
    assert (finding.kind, finding.what) == ("running", f"MLflow run {dead}")
    assert recipe_is_alive(record, "f-mine") and recipe_is_alive(record, "f-dead") is False
    assert recipe_is_alive(record, "unknown") is None
    assert finding.repair is not None and finding.repair() == "marked KILLED"
    assert record.client.get_run(dead).info.status == "KILLED"
    assert record.client.get_run(mine).info.status == "RUNNING"
    assert list(audit_tracking(record, set())) == []
    record.finish(mine, "FINISHED")


def test_an_alias_without_an_artifact_is_found(home: Path, record: Tracking) -> None:
    made = publish(home, "sft")
    record.models.log(record.stage_run(None, "tiny", "sft", {}, {}), made, "sft", 1)
    record.models.set_alias("tiny", "dev3", made)
    assert promoted(record) == {"dev3@tiny": made.digest}
    assert list(audit_tracking(record, {made.digest})) == []
    (finding,) = audit_tracking(record, set())
    assert (finding.kind, finding.what, finding.repair) == ("missing", "alias dev3@tiny", None)
    assert f"artifact {made.digest[:12]}" in finding.said


def test_every_alias_is_found_in_a_registry_of_several_pages(
    home: Path, record: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one model on a page, as with 100: what `r1 prune` keeps is not only what is on the first one."""
    made = {name: publish(home, f"sft_{name}") for name in ("one", "two", "three")}
    for name, manifest in made.items():
        record.models.log(record.stage_run(None, name, "sft", {}, {}), manifest, "sft", 1)
        record.models.set_alias(name, "best", manifest)
    for search in ("search_registered_models", "search_experiments"):
        monkeypatch.setattr(record.client, search, partial(getattr(record.client, search), max_results=1))
    found = {name: digest for name, digest in promoted(record).items() if name.startswith("best@")}
    assert found == {f"best@{name}": manifest.digest for name, manifest in made.items()}
    for name, manifest in made.items():
        assert record.models.by_alias("best", name, Store(home)) == manifest
    assert {record.experiment(name) for name in made} <= set(record.experiments())


def test_a_run_that_was_continued_is_not_old(record: Tracking) -> None:
    """MLflow keeps the time at which it had ended before."""
    run = record.recipe_run("continued", "run", {}, {})
    record.client.set_terminated(run, "FAILED", end_time=1000)
    assert [old.id for old in old_runs(record, 10.0, ())] == [run]
    record.reopen(run)
    assert record.client.get_run(run).info.end_time == 1000 and old_runs(record, 10.0, ()) == []
    record.finish(run, "FINISHED")


def test_what_a_live_run_made_or_read_is_in_use(home: Path, record: Tracking) -> None:
    parent = record.recipe_run("live", "run", {}, {})
    data = publish(home, "problems")
    stage = record.stage_run(parent, "live", "sft", {}, {DIGEST_TAG: "made"})
    record.log_dataset(stage, data, "problems", "input")
    record.finish(stage, "FINISHED")
    assert {"made", data.digest} <= digests_in_use(record)
    record.finish(parent, "FINISHED")
    assert "made" not in digests_in_use(record)


def test_a_run_that_waits_at_a_gate_keeps_what_it_made(record: Tracking) -> None:
    """Its process has ended; when somebody answers, it starts again from what it made."""
    parent = record.recipe_run("asks", "run", {}, {})
    stage = record.stage_run(parent, "asks", "sft", {}, {DIGEST_TAG: "before the gate"})
    record.finish(stage, "FINISHED")
    record.set_tags(parent, {WAITING_TAG: f"{time.time() + 3600:.0f}"})
    record.finish(parent, "KILLED")
    later = time.time() + 60
    assert "before the gate" in digests_in_use(record)
    assert parent not in [old.id for old in old_runs(record, later, ())]
    assert [run.status for run in record.reader.recipe_runs() if run.id == parent] == []  # no recipe run by its tags
    record.set_tags(parent, {WAITING_TAG: f"{time.time() - 1:.0f}"})  # nobody answered in time
    assert "before the gate" not in digests_in_use(record)
    assert parent in [old.id for old in old_runs(record, later, ())]
