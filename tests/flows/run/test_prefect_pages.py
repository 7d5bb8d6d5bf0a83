"""What a run leaves on its pages in Prefect: a real server, a real stage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import State

from flows.recipe.forms import Inputs, Seed
from flows.recipe.sections import Report
from flows.run.dispatch import run_here
from flows.run.graph_edges import link_result
from flows.stage_contract import gpu_slots
from flows.stage_contract.runner import run_stage
from flows.stage_contract.stage import Context, Outcome, RunContext, Stage, Step
from flows.stage_contract.stage_flow import stage_flow
from grpo.config.common import Hardware
from grpo.errors import InputError
from tests.support.prefect_server import DEADLINE_S, Server, start_run
from tests.support.r1 import R1

pytestmark = pytest.mark.system

SMALL = ["problems.sources.0.count=60", "problems.sources.1.count=60", "problems.sources.2.count=60"]


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


@stage_flow("made")
def made(config: Report, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    return run_stage(Stage("made", 1, (), build), config, inputs or {}, seed, where or RunContext())


@stage_flow("read")
def read(config: Report, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    return run_stage(Stage("read", 1, ("made",), build), config, inputs or {}, seed, where or RunContext())


def build(context: Context) -> Outcome:
    (context.out / "words").write_text("1")
    return Outcome()


@flow
def recipe() -> None:
    first = Step(Stage("made", 1, (), build), made)
    key = link_result(run_here(first, Report(), {}, 0, RunContext()))
    second = Step(Stage("read", 1, ("made",), build), read)
    link_result(run_here(second, Report(), {"made": key}, 0, RunContext()))


def test_the_graph_of_a_recipe_has_stages_in_the_order_of_their_data(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with temporary_settings({PREFECT_API_URL: server.url}):
        for _ in ("made", "reused"):
            id = recipe(return_state=True).state_details.flow_run_id
            graph = server.ask("GET", f"/flow_runs/{id}/graph-v2")
            nodes = {node["label"].split(" / ")[0]: node for _, node in graph["nodes"]}
            assert {parent["id"] for parent in nodes["read"]["parents"]} == {nodes["made"]["id"]}
            assert nodes["made"]["parents"] == []


def logs(server: Server, run: dict[str, Any]) -> list[str]:
    asked = {"flow_run_id": {"any_": [run["id"]]}}
    return [line["message"] for line in server.ask("POST", "/logs/filter", logs=asked, sort="TIMESTAMP_ASC")]


def test_the_logs_of_a_stage_have_its_progress_and_result(server: Server, runs: dict[str, dict[str, Any]]) -> None:
    lines = logs(server, runs["problems"])
    assert lines[0] == "problems: starting" and "problems: step 3/3" in lines[-2]
    assert lines[-1].startswith("problems: made in ") and "source0_read 60" in lines[-1]


def test_the_logs_of_a_recipe_have_its_stages(server: Server, runs: dict[str, dict[str, Any]]) -> None:
    lines = logs(server, runs["train-r1"])
    assert lines[0] == "stage 1 of 1: problems" and lines[1].startswith("problems: made in ")
