"""What a run leaves on its pages in Prefect: a real server, a real stage."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, State

from flows.home import LOGGERS
from flows.recipe.forms import Inputs, Seed
from flows.recipe.sections import Report
from flows.run.dispatch import _Dispatch, dispatch
from flows.run.graph_edges import link_result
from flows.run.here import run_here
from flows.stage_contract import gpu_slots
from flows.stage_contract.runner import run_stage
from flows.stage_contract.stage import Context, Outcome, RunContext, Stage, Step
from flows.stage_contract.stage_flow import completed, stage_flow
from flows.stage_flows import STAGE_FLOWS
from grpo.config.common import Hardware
from grpo.errors import InputError
from grpo.judging.chat_models import CountedReplies
from tests.support.prefect_server import DEADLINE_S, Server, start_run
from tests.support.r1 import R1, ROOT

pytestmark = pytest.mark.system

SMALL = ["problems.sources.0.count=120", "problems.sources.1.count=60"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("prefect"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def runs(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The flow runs of a recipe whose first stage ran, by the names of their flows."""
    process = start_run(R1(tmp_path_factory.mktemp("home")), server, SMALL)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors[-2000:]
    flows = {flow["id"]: flow["name"] for flow in server.ask("POST", "/flows/filter")}
    return {flows[run["flow_id"]]: run for run in server.ask("POST", "/flow_runs/filter")}


def test_names_of_runs_say_recipe_seed_and_overrides(server: Server, runs: dict[str, dict[str, Any]]) -> None:
    label = " · ".join(["tiny seed 0", *SMALL])
    assert runs["train-r1"]["name"] == label
    assert runs["problems"]["name"] == f"problems {label}"


def test_names_of_tasks_say_them_too(server: Server, tmp_path: Path) -> None:
    settings = ["base.pretrain.steps=2", "base.documents=200"]
    process = start_run(R1(tmp_path), server, settings, ("--only", "base"))
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors[-2000:]
    flows = {"name": {"any_": ["base"]}}
    (task,) = server.ask("POST", "/task_runs/filter", flows=flows)
    assert task["name"] == " · ".join(["base: trainer, tiny seed 0", *settings])


def test_a_job_holds_a_slot_for_each_of_its_gpus(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_slots, "gpus", lambda: ["0", "1"])
    hardware = Hardware(device="cuda", processes=2)
    with temporary_settings({PREFECT_API_URL: server.url}):
        with gpu_slots.gpu_slots(hardware):  # the server has no limit yet
            pass
        server.ask("POST", "/v2/concurrency_limits/", name="r1-gpus", limit=3)

        def held() -> int:
            return server.ask("GET", "/v2/concurrency_limits/r1-gpus")["active_slots"]

        with gpu_slots.gpu_slots(hardware):
            assert held() == 2
            with gpu_slots.gpu_slots(Hardware(device="cpu")):
                assert held() == 2
        assert held() == 0
        too_many = "4 processes take a GPU each, but the server's limit r1-gpus has 3"
        with pytest.raises(InputError, match=too_many), gpu_slots.gpu_slots(Hardware(processes=4)):
            pass


def build(context: Context) -> Outcome:
    (context.out / "words").write_text("1")
    return Outcome()


def judging(context: Context) -> Outcome:
    replies = CountedReplies(8, context.progress.of("judge"))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda index: replies.end(index, None), range(8)))
    return build(context)


def flow_of(stage: Stage) -> Any:
    @stage_flow(stage.name)
    def run(config: Report, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
        return completed(run_stage(stage, config, inputs or {}, seed, where or RunContext()))

    return run


MADE, READ = Stage("made", 1, (), build), Stage("read", 1, ("made",), build)
FIRST, SECOND = Step(MADE), Step(READ)
made, read, judged = flow_of(MADE), flow_of(READ), flow_of(Stage("judged", 1, (), judging))


@pytest.fixture(autouse=True)
def known_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in (made, read):
        monkeypatch.setitem(STAGE_FLOWS, stage.name, stage)


@flow
def recipe(dispatched: bool = False) -> None:
    run_step = dispatch if dispatched else run_here
    key = link_result(run_step(FIRST, Report(), {}, 0, RunContext()))
    link_result(run_step(SECOND, Report(), {"made": key}, 0, RunContext()))


def test_items_that_threads_finish_are_a_bar_on_the_runs_page(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with temporary_settings({PREFECT_API_URL: server.url}):
        run = str(judged(Report(), return_state=True).state_details.flow_run_id)
    of_run = {"flow_run_id": {"any_": [run]}, "type": {"any_": ["progress"]}}
    (bar,) = server.ask("POST", "/artifacts/filter", artifacts=of_run)
    assert (bar["key"], bar["data"], bar["description"].split(" · ")[0]) == (
        "progress-judged-judge",
        100.0,
        "judge: step 8/8",
    )


def assert_read_follows_made(server: Server, recipe_run: Any) -> None:
    graph = server.ask("GET", f"/flow_runs/{recipe_run}/graph-v2")
    nodes = {node["label"].split(" / ")[0]: node for _, node in graph["nodes"]}
    assert {parent["id"] for parent in nodes["read"]["parents"]} == {nodes["made"]["id"]}
    assert nodes["made"]["parents"] == []


def test_the_graph_of_a_recipe_has_stages_in_the_order_of_their_data(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with temporary_settings({PREFECT_API_URL: server.url}):
        for _ in ("made", "reused"):
            assert_read_follows_made(server, recipe(return_state=True).state_details.flow_run_id)


@pytest.mark.slow
def test_the_graph_of_dispatched_stages_too(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As every form starts them: each stage is a flow run of its deployment. This process stands in for the worker."""

    def work(self: _Dispatch, run: Any) -> None:
        step = {"made": FIRST, "read": SECOND}[self.job.stage]
        parameters = self.job.parameters
        run_stage(step.stage, Report(), parameters["inputs"], 0, RunContext(**parameters["where"]))
        self.client.set_flow_run_state(run.id, Completed(), force=True)

    monkeypatch.setattr(_Dispatch, "_wait", work)
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("made", "read"):
        server.ask("POST", "/deployments/", name=name, flow_id=server.ask("POST", "/flows/", name=name)["id"])
    with temporary_settings({PREFECT_API_URL: server.url}):
        state = recipe(dispatched=True, return_state=True)
        assert state.is_completed(), state.message
        id = state.state_details.flow_run_id
        assert_read_follows_made(server, id)
        runs = server.ask("POST", "/flow_runs/filter", flow_runs={"parent_flow_run_id": {"any_": [str(id)]}})
        assert sorted(run["name"].split()[0] for run in runs if run["deployment_id"]) == ["made", "read"]


def logs(server: Server, run: dict[str, Any]) -> list[str]:
    asked = {"flow_run_id": {"any_": [run["id"]]}}
    return [line["message"] for line in server.ask("POST", "/logs/filter", logs=asked, sort="TIMESTAMP_ASC")]


def test_the_logs_of_a_stage_have_its_progress_and_result(server: Server, runs: dict[str, dict[str, Any]]) -> None:
    lines = logs(server, runs["problems"])
    assert lines[0] == "problems: starting" and "problems: step 2/2" in lines[-2]
    assert lines[-1].startswith("problems: made in ") and "source0_read 120" in lines[-1]


def test_the_logs_of_a_recipe_have_its_stages(server: Server, runs: dict[str, dict[str, Any]]) -> None:
    lines = logs(server, runs["train-r1"])
    assert lines[0] == "stage 1 of 1: problems" and lines[1].startswith("problems: made in ")


TRAINER = """
import logging, sys
from pathlib import Path
from grpo import train
from grpo.processes.metrics_log import write_result

def warn(job):
    logging.getLogger("grpo.rl.trainer").warning("kl_blow_up: step %d: KL is large", 3)
    write_result(job.result, 0, 0)

if __name__ == "__main__":
    sys.modules["warner"] = sys.modules["__main__"]
    train.RUNNERS["copy_model"] = "warner:warn"
    sys.exit(train.main(sys.argv[1:]))
"""
FLOW = """
import sys
from pathlib import Path
from prefect import flow
from tasks.trainer import launch

work = Path(sys.argv[1])
launch.command = lambda job, *_: [sys.executable, str(work / "trainer.py"), str(job)]

@flow
def warned():
    places = {name: str(work / name) for name in ("out", "state", "result.json", "metrics.jsonl", "model")}
    job = {"kind": "copy_model", "seed": 0, "out": places["out"], "state": places["state"], "model": places["model"]}
    logs = {"result": places["result.json"], "metrics": places["metrics.jsonl"]}
    launch.launch({**job, **logs}, work, on_metrics=print)

warned()
"""


@pytest.mark.slow
def test_the_logs_of_a_flow_run_have_the_warnings_of_its_trainer(server: Server, tmp_path: Path) -> None:
    for name, text in (("trainer.py", TRAINER), ("run.py", FLOW)):
        (tmp_path / name).write_text(text)
    settings = {"PREFECT_API_URL": server.url, "PREFECT_LOGGING_EXTRA_LOGGERS": LOGGERS, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-2000:]
    flows = {flow["id"]: flow["name"] for flow in server.ask("POST", "/flows/filter")}
    (run,) = [run for run in server.ask("POST", "/flow_runs/filter") if flows[run["flow_id"]] == "warned"]
    assert logs(server, run).count("kl_blow_up: step 3: KL is large") == 1
