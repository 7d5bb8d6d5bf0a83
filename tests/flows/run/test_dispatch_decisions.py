"""Dispatch: which flow run is waited for, when another is started, when a stage fails, and which parameters it gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.states import Pending

from flows.recipe.load import load_recipe, shipped
from flows.recipe.sections import Report
from flows.run import dispatch
from flows.run.deployed import deployment_of, with_absolute_paths
from flows.run.dispatch_decisions import TRIES, Action, Child, Job, decide, pause_s
from flows.run.here import run_here
from flows.stage_contract.references import external
from flows.stage_contract.runner import run_stage
from flows.stage_contract.stage import Outcome, RunContext, Stage, Step, hashed_config, key_of
from flows.stage_flows import STAGE_FLOWS
from flows.stage_graphs import GRAPHS
from grpo.errors import InputError
from tasks.store.objects.bucket import Unreachable
from tasks.store.store import Store
from tasks.trainer.outcome import StageFailed


def child(name: str, type: str, mine: bool = True) -> Child:
    return Child(name, type, mine=mine)


def test_a_stage_that_nobody_works_on_is_started() -> None:
    assert decide([]) == Action("start")
    old = [child("a", "FAILED", mine=False), child("b", "CANCELLED", mine=False), child("c", "COMPLETED", mine=False)]
    assert decide(old) == Action("start")  # how others ended does not matter: the artifact is missing


@pytest.mark.parametrize("type", ["SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING"])
@pytest.mark.parametrize("mine", [True, False])
def test_whoever_works_on_it_is_waited_for(type: str, mine: bool) -> None:
    runs = [child("a", "CRASHED"), child("b", "SCHEDULED", mine=False), child("c", type, mine)]
    action = decide(runs)
    assert action.kind == "wait" and action.child is not None
    assert action.child.id == ("b" if type == "SCHEDULED" else "c")  # the one that is furthest


def test_a_crash_is_tried_again_until_the_third() -> None:
    assert TRIES == 3
    crash = [child(str(number), "CRASHED") for number in range(3)]
    assert decide(crash[:1]).kind == decide(crash[:2]).kind == "start"
    assert decide(crash) == Action("fail", crash[2])
    of_others = [child(str(number), "CRASHED", mine=False) for number in range(9)]
    assert decide([*of_others, *crash[:2]]).kind == "start"  # crashes of an earlier start are not counted


def test_an_object_store_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage trains on meanwhile."""
    away = Unreachable("s3://bucket: no answer")
    answers: list[Any] = [None, away, away, "manifest", away]

    def artifact() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    said: list[str] = []
    monkeypatch.setattr(dispatch, "POLL_S", 0)
    monkeypatch.setattr(dispatch._Dispatch, "_say", lambda _, line: said.append(line))
    job = cast(Any, SimpleNamespace(stage="sft", artifact=artifact))
    waiting = dispatch._Dispatch(cast(Any, SimpleNamespace(api_url="http://here")), job)
    assert [waiting._request(job.artifact) for _ in range(2)] == [None, "manifest"]
    assert said == ["sft: the object store (s3://bucket: no answer) does not answer; waiting"] * 2
    monkeypatch.setattr(dispatch, "AWAY_S", -1)
    with pytest.raises(StageFailed, match=r"the object store \(s3://bucket: no answer\) has been away"):
        waiting._request(job.artifact)


@pytest.mark.parametrize(("quiet_s", "lines"), [(0.0, 1), (60.0, 0)])
def test_a_run_that_does_not_begin_is_named(quiet_s: float, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(dispatch, "QUIET_S", quiet_s)
    monkeypatch.setattr(dispatch._Dispatch, "_say", lambda _, line: said.append(line))
    waiting = dispatch._Dispatch(cast(Any, None), cast(Any, SimpleNamespace(stage="sft")))
    run = SimpleNamespace(name="sft-7", work_pool_name="r1-gpu", state=Pending())
    waiting._explain(cast(Any, run))
    assert len(said) == lines and all(
        "'r1-gpu' has taken flow run 'sft-7', which has not begun" in line for line in said
    )


def test_who_waits_long_looks_less_often() -> None:
    assert [pause_s(waited) for waited in (0, 40, 100, 200, 10_000)] == [2, 2, 5, 10, 10]


@pytest.mark.parametrize("type", ["FAILED", "CANCELLED", "COMPLETED"])
def test_what_is_no_crash_is_not_tried_again(type: str) -> None:
    assert decide([child("a", "CRASHED"), child("b", type)]) == Action("fail", child("b", type))


def made(home: Path, key: str, attempt: int) -> None:
    with Store(home).attempt("sft", key, force=True) as work:
        (work.out / "weights").write_text(str(attempt))
        assert work.publish(stage_version=1, config={"seed": 0}).attempt == attempt


def test_a_forced_stage_is_done_by_a_newer_attempt_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.store.manifest import artifact_key

    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    key = artifact_key("sft", 1, {"seed": 0}, {})
    plain, forced = (
        Job("sft", "sft tiny seed 0", "sft/sft", key, {}, "run", 1),
        Job("sft", "sft tiny seed 0", "sft/sft", key, {}, "run", 1, min_attempt=2),
    )
    assert plain.artifact() is None and forced.artifact() is None
    made(tmp_path, key, 1)
    assert plain.artifact() is not None and forced.artifact() is None
    made(tmp_path, key, 2)
    assert forced.artifact() is not None
    assert forced.tags == [f"r1flow.key:{key}", "r1flow.by:run", "r1flow.life:1", "r1flow.above:1"]


def test_a_stage_that_is_reused_has_no_heartbeat_to_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect waits for each flow's heart to stop; one that works needs it, since its machine may die."""
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    seen: list[int | None] = []
    result = {"name": "sft", "status": "ran", "seconds": 1.0, "counts": {}, "metrics": {}}

    def flow(config: Any, **given: Any) -> dict[str, Any]:
        seen.append(PREFECT_FLOWS_HEARTBEAT_FREQUENCY.value())
        return result

    monkeypatch.setitem(STAGE_FLOWS, "sft", cast(Any, flow))
    step = Step(Stage("sft", 1, (), build=lambda context: Outcome()))
    key = key_of(step.stage, Report(), 0, {})
    assert run_here(step, Report(), {}, 0, RunContext()) == result
    with Store(tmp_path).attempt("sft", key) as work:
        (work.out / "weights").write_text("1")
        work.publish(stage_version=1, config=hashed_config(step.stage, Report(), 0))
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):  # without a server it needs no flow
        for force in (False, True):
            run_here(step, Report(), {}, 0, RunContext(force=force))
    beats = PREFECT_FLOWS_HEARTBEAT_FREQUENCY.value()
    assert beats is not None and seen == [beats, None, beats]


HELD = """
import sys, time
from pathlib import Path
from tasks.store.store import Store
with Store(Path(sys.argv[1])).attempt("sft", "ab" * 32):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_abandoned_when_its_holder_was_killed_not_when_it_was_given_back(tmp_path: Path) -> None:
    began = datetime.now(UTC)
    store, key = Store(tmp_path), "ab" * 32
    assert not store.is_abandoned(key, began)  # nobody ever took it

    def hold() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HELD, str(tmp_path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    gone = hold()
    assert not store.is_abandoned(key, began)
    gone.communicate("")
    assert not store.is_abandoned(key, began)
    killed = hold()
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert store.is_abandoned(key, began)
    assert not store.is_abandoned(key, datetime.now(UTC) + timedelta(seconds=1))  # an earlier run's, not this one's


@pytest.mark.parametrize("name", shipped())
def test_a_configuration_means_the_same_after_its_journey(name: str) -> None:
    """The JSON parameters of a flow run make the same key."""
    recipe = load_recipe(name)
    steps = [step for graph in GRAPHS.values() for step in _steps(graph, recipe)]
    assert len(steps) >= 11  # of the graph r1 alone
    for step in steps:
        config = step.config(recipe)
        arrived = type(config).model_validate(config.model_dump(mode="json", exclude_unset=True))
        assert arrived == config
        assert hashed_config(step.stage, arrived, 0) == hashed_config(step.stage, config, 0)
        if judge := getattr(config, "judge", None):  # is told to others by what was set
            assert arrived.judge.model_dump_json(exclude_unset=True) == judge.model_dump_json(exclude_unset=True)
        flow, deployment = deployment_of(step).split("/")
        assert flow == deployment


def _steps(graph: Any, recipe: Any) -> list[Any]:
    try:
        steps = list(graph(recipe))
        [step.config(recipe) for step in steps]
    except InputError:  # the recipe has no section for this graph
        return []
    return steps


def test_paths_are_whole_when_they_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    recipe = load_recipe("smollm2-135m", ["base.model=./model"])
    step = next(step for step in GRAPHS["r1"](recipe) if step.name == "base")
    config: Any = step.config(recipe)
    found = {name: external(path) for name, path in step.stage.files(config).items()}
    sent = with_absolute_paths(step, config, found)
    assert sent["model"] == str(tmp_path / "model")
    arrived = type(config).model_validate(sent)
    assert hashed_config(step.stage, arrived, 0) == hashed_config(step.stage, config, 0)


def test_only_paths_are_whole_not_names_of_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("gsm8k", "train"):
        (tmp_path / folder).mkdir()
    overrides = ['evaluate.sets=[{name="gsm8k",path="gsm8k"}]', 'problems.sources=[{kind="dataset",name="train"}]']
    recipe = load_recipe("tiny", [*overrides, "problems.sources.0.split=train"])
    graph = {step.name: step for step in GRAPHS["r1"](recipe)}

    def sent(stage: str) -> dict[str, Any]:
        step, config = graph[stage], graph[stage].config(recipe)
        found = {name: external(path) for name, path in step.stage.files(config).items()}
        return with_absolute_paths(step, config, found)

    (tmp_path / "gs.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    spelled = load_recipe("tiny", ['evaluate.sets=[{name="gsm8k",path=".//gs.jsonl"}]']).evaluate.sets
    assert spelled == load_recipe("tiny", ['evaluate.sets=[{name="gsm8k",path="gs.jsonl"}]']).evaluate.sets
    gsm8k = {"name": "gsm8k", "path": str(tmp_path / "gsm8k")}
    assert sent("evaluate")["sets"] == [gsm8k]
    problems = sent("problems")
    assert problems["sources"] == [{"kind": "dataset", "name": str(tmp_path / "train"), "split": "train"}]
    assert {name: problems["test_sets"][0][name] for name in gsm8k} == gsm8k


def test_a_stage_whose_key_differs_from_its_callers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    recipe = load_recipe("tiny")
    step = GRAPHS["r1"](recipe)[0]
    with pytest.raises(
        InputError, match="stage 'problems' has another key here, .* than at its caller, ffffffffffffffff"
    ):
        run_stage(step.stage, step.config(recipe), {}, 0, RunContext(key="f" * 64))
