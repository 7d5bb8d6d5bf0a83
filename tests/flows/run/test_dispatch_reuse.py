"""A stage that another recipe's flow run makes while this recipe waits: it is recorded as reused, and protected."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Crashed, Running, Scheduled

from flows.home import store, tracking
from flows.recipe.sections import Report
from flows.run import dispatch
from flows.run.dispatch_decisions import KEY, RECIPE_RUN, RUN_COUNT
from flows.run.graph_edges import link_result
from flows.stage_contract.runner import run_stage
from flows.stage_contract.stage import Context, Outcome, RunContext, Stage, Step, key_of
from tasks.tracking.reuse import reuses


def build(context: Context) -> Outcome:
    (context.out / "text").write_text("hello")
    return Outcome(counts={"letters": 5})


STEP = Step(Stage("toy", 1, (), build))
KEY_TAG = f"{KEY}{key_of(STEP.stage, Report(), 0, {})}"
SUFFIX = "-0/toy-"  # of a current pointer: RECIPE-SEED/STAGE-ORIGINS


class Server:
    """Stands in for a Prefect server with one flow run, which the recipe run `tagged` started. When it is first looked
    at, the stage is made for the recipe `maker` with the MLflow run `run_id`, and its state becomes `end`."""

    api_url = "http://here"

    def __init__(self, maker: str, run_id: str, tagged: str, end: Any):
        self.maker, self.run_id, self.end = maker, run_id, end
        self.run = FlowRun(id=uuid4(), flow_id=uuid4(), state=Running(), tags=[KEY_TAG, f"{RECIPE_RUN}{tagged}"])
        self.run.tags.append(f"{RUN_COUNT}1")

    def read_flow_runs(self, **_: Any) -> list[FlowRun]:
        return [self.run]

    def read_flow_run(self, _: Any) -> FlowRun:
        if self.run.state != self.end:
            where = RunContext(recipe=self.maker, parent_run_id=self.run_id)
            run_stage(STEP.stage, Report(), {}, 0, where)
            self.run.state = self.end
        return self.run


@pytest.fixture(autouse=True)
def no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with temporary_settings({PREFECT_API_URL: ""}):
        yield


def dispatched(
    server: Server,
    recipe_run: str,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
    step: Step = STEP,
    inputs: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What recipe "b" gets that waits for the server's flow run."""

    @contextmanager
    def client(**_: Any) -> Iterator[Server]:
        yield server

    monkeypatch.setattr(dispatch, "get_client", client)
    flow_run = SimpleNamespace(id=recipe_run, run_count=1, work_queue_name=None)
    monkeypatch.setattr(FlowRunContext, "get", lambda: cast(Any, SimpleNamespace(flow_run=flow_run)))
    where = RunContext(recipe="b", parent_run_id=run_id)
    return dispatch.dispatch(step, Report(), inputs or {}, 0, where)


def recorded(run_id: str) -> tuple[list[str], list[str]]:
    """The stages that an MLflow run made, and those that it reuses."""
    record = tracking()
    run = record.reader.run(run_id)
    assert run is not None
    made = [stage.tags["r1flow.stage"] for stage in record.reader.stage_runs(run_id)]
    return made, [reuse.stage for reuse in reuses(run.tags)]


def protected() -> list[str]:
    """The recipes for which the artifact is current."""
    return sorted(name.split(SUFFIX)[0] for name in store().backend.pointers() if SUFFIX in name)


def test_what_another_recipe_makes_meanwhile_is_recorded_as_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (tracking().recipe_run(name, f"{name} seed 0", {}, {}) for name in "ab")
    server = Server("a", first, "flow-of-a", Completed())
    result = dispatched(server, "flow-of-b", second, monkeypatch)
    assert (result["status"], result["counts"]) == ("reused", {"letters": 5})
    assert recorded(first) == (["toy"], []) and recorded(second) == ([], ["toy"])
    assert protected() == ["a", "b"]


def test_what_ones_own_flow_run_makes_is_recorded_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = tracking().recipe_run("b", "b seed 0", {}, {})
    server = Server("b", own, "flow-of-b", Completed())
    result = dispatched(server, "flow-of-b", own, monkeypatch)
    assert (result["status"], result["flow_run"]) == ("ran", str(server.run.id))
    assert recorded(own) == (["toy"], []) and protected() == ["b"]


@pytest.mark.parametrize("end", [Crashed(), Scheduled()], ids=["broke off", "never began"])
def test_what_ones_own_flow_run_did_not_record_is_recorded(monkeypatch: pytest.MonkeyPatch, end: Any) -> None:
    """Another process published; the own flow run ended, or was not begun."""
    first, second = (tracking().recipe_run(name, f"{name} seed 0", {}, {}) for name in "ab")
    result = dispatched(Server("a", first, "flow-of-b", end), "flow-of-b", second, monkeypatch)
    assert result["status"] == "reused" and recorded(second) == ([], ["toy"]) and protected() == ["a", "b"]


def test_only_ones_own_flow_run_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other recipe still needs what it is waiting for."""
    run_id = tracking().recipe_run("b", "b seed 0", {}, {})
    for owner, cancelled in (("flow-of-a", 0), ("flow-of-b", 1)):
        server = Server("a", run_id, owner, Completed())
        told: list[Any] = []
        monkeypatch.setattr(server, "set_flow_run_state", lambda *sent, told=told: told.append(sent), raising=False)
        monkeypatch.setattr(server, "read_flow_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dispatched(server, "flow-of-b", run_id, monkeypatch)
        assert [state.type.value for _, state in told] == ["CANCELLING"] * cancelled


def interrupted(*_: Any) -> FlowRun:
    raise KeyboardInterrupt


def test_what_appears_before_anything_is_waited_for_is_recorded_as_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (tracking().recipe_run(name, f"{name} seed 0", {}, {}) for name in "ab")
    server = Server("a", first, "flow-of-a", Completed())

    def published_meanwhile(**_: Any) -> list[FlowRun]:
        return [server.read_flow_run(None)]

    monkeypatch.setattr(server, "read_flow_runs", published_meanwhile)
    assert dispatched(server, "flow-of-b", second, monkeypatch)["status"] == "reused"
    assert recorded(second) == ([], ["toy"]) and protected() == ["a", "b"]


NUMBERS = itertools.count()


def number(context: Context) -> Outcome:
    """Differs in every attempt."""
    (context.out / "text").write_text(str(next(NUMBERS)))
    return Outcome()


NUMBER = Stage("number", 1, (), number)
READER = Step(Stage("reader", 1, ("number",), build))


@pytest.mark.parametrize(("given", "end"), [("latest", Completed()), ("key", Crashed()), ("digest", Completed())])
def test_the_worker_reads_what_the_recipe_found(given: str, end: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the flow run waits, another run makes a newer artifact under the same key."""
    own = tracking().recipe_run("b", "b seed 0", {}, {})
    found = run_stage(NUMBER, Report(), {}, 0, None)
    reference = {"latest": "latest", "key": found["key"], "digest": link_result(found)}[given]
    tags = [f"{RECIPE_RUN}flow-of-b", f"{RUN_COUNT}1"]
    run = FlowRun(id=uuid4(), flow_id=uuid4(), state=Running(), tags=tags)
    server: Any = SimpleNamespace(api_url="http://here", read_flow_runs=lambda **_: [], read_flow_run=lambda _: run)

    def worked(_: str, parameters: dict[str, Any], **__: Any) -> FlowRun:
        assert (parameters["inputs"]["number"] is reference) == (given == "digest")  # an edge of Prefect's graph
        newer = run_stage(NUMBER, Report(), {}, 0, RunContext(force=True))
        assert newer["key"] == found["key"] and newer["digest"] != found["digest"]
        run_stage(READER.stage, Report(), parameters["inputs"], 0, RunContext(**parameters["where"]))
        run.state = end
        return run

    monkeypatch.setattr(dispatch, "run_deployment", worked)
    result = dispatched(server, "flow-of-b", own, monkeypatch, READER, {"number": reference})
    assert result["status"] == ("ran" if end.is_completed() else "reused")
    assert store().resolve(result["digest"]).inputs["number"].digest == found["digest"]
