"""A recipe that is taken up again after a crash, or goes on after a pause, stays one row in MLflow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

from flows.home import tracking
from flows.recipe.load import load_recipe
from flows.run.executor import _begin
from tasks.tracking.client import RECIPE_FILE, Tracking


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracking]:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield tracking()


def begin(record: Tracking, flow_run: UUID, *overrides: str) -> str:
    """As the flow of a recipe does in its process."""
    with FlowRunContext.model_construct(flow_run=FlowRun(id=flow_run, flow_id=uuid4())):
        return _begin(record, load_recipe("tiny", overrides), "train_r1", overrides)


def test_the_same_flow_run_goes_on_with_its_run(record: Tracking) -> None:
    mine = uuid4()
    first = begin(record, mine)
    record.set_tags(first, {"r1flow.failed": "sft", "r1flow.error": "its process is gone"})
    record.finish(first, "KILLED")
    assert begin(record, mine) == first
    (run,) = record.reader.recipe_runs()
    assert (run.status, run.ended) == ("RUNNING", None)
    assert run.tags["r1flow.flow_run"] == str(mine)
    assert not {"r1flow.failed", "r1flow.error"} & run.tags.keys()


def test_another_flow_run_or_another_recipe_begins_a_run_of_its_own(record: Tracking) -> None:
    mine = uuid4()
    first = begin(record, mine)
    assert begin(record, uuid4()) != first
    changed = begin(record, mine, "sft.epochs=7")  # its file was edited meanwhile
    assert changed != first and record.reader.read_json(changed, RECIPE_FILE)["sft"]["epochs"] == 7
    assert begin(record, mine, "sft.epochs=7") == changed
    assert len(record.reader.recipe_runs()) == 3
