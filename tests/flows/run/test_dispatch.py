"""A recipe triggered through the API as the UI does: every stage runs on its pool. A real server, workers, MLflow, with
their records in SQLite and in Postgres."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.stage_graphs import R1
from tests.support.installation import Installation, needs_postgres, postgres_installation

pytestmark = pytest.mark.slow

STAGES = ["problems", "base", "cold_start_data", "cold_start_sft", "reasoning_rl", "sft_data", "sft", "reward_models"]
STAGES += ["alignment_rl", "evaluate", "report"]
NO_GPU = {"problems", "report"}


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=needs_postgres)])
def r1flow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    sqlite = nullcontext(Installation(tmp_path_factory.mktemp("up")))
    with postgres_installation() if request.param == "postgres" else sqlite as installation:
        installation.up()
        yield installation
        installation.down()


@pytest.fixture(scope="module")
def recipe(r1flow: Installation) -> dict[str, Any]:
    return r1flow.wait_for(r1flow.start(), "Completed")


def test_every_stage_ran_on_its_pool(r1flow: Installation, recipe: dict[str, Any]) -> None:
    assert recipe["work_pool_name"] == "r1-cpu"
    for stage in STAGES:
        (run,) = r1flow.stage(stage)
        assert run["work_pool_name"] == ("r1-tasks" if stage in NO_GPU else "r1-gpu"), stage
        assert run["state"]["name"] == "Completed"
        parent = r1flow.ask("GET", f"/task_runs/{run['parent_task_run_id']}")
        assert parent["flow_run_id"] == recipe["id"]
    assert len(list(r1flow.home.glob("artifacts/*/*/*/manifest.json"))) == len(STAGES)
    assert not list(r1flow.home.glob("work/*"))
    r1flow.assert_nothing_runs_without_a_process()


def test_the_graph_of_the_recipe_follows_the_data(r1flow: Installation, recipe: dict[str, Any]) -> None:
    graph = r1flow.ask("GET", f"/flow_runs/{recipe['id']}/graph-v2")
    nodes = {node["id"]: node for _, node in graph["nodes"]}
    runs = {stage: r1flow.stage(stage)[0]["id"] for stage in STAGES}
    for step in R1:
        parents = {parent["id"] for parent in nodes[runs[step.name]]["parents"]}
        assert parents == {runs[maker] for maker in step.inputs.values()}, step.name


def test_mlflow_has_a_run_for_every_stage_below_the_recipes(r1flow: Installation, recipe: dict[str, Any]) -> None:
    url = f"http://127.0.0.1:{r1flow.mlflow_port}/api/2.0/mlflow"
    experiment = httpx.get(f"{url}/experiments/get-by-name", params={"experiment_name": "tiny"}).json()["experiment"]
    asked = {"experiment_ids": [experiment["experiment_id"]], "max_results": 100}
    runs = httpx.post(f"{url}/runs/search", json=asked).json()["runs"]
    parents = {tag["value"] for run in runs for tag in run["data"]["tags"] if tag["key"] == "mlflow.parentRunId"}
    (parent,) = parents
    assert {run["info"]["status"] for run in runs} == {"FINISHED"}
    of_stages = [run["info"]["run_name"] for run in runs if run["info"]["run_id"] != parent]
    assert sorted(name.partition(" tiny seed 0")[0] for name in of_stages) == sorted(STAGES)


@pytest.mark.parametrize(
    ("deployment", "own"),
    [
        ("train-r1-zero", {"r1_zero"}),
        ("train-distill", {"base_small", "student_small", "base_smallest", "student_smallest"}),
        ("train-rlhf-ppo", {"rlhf_ppo"}),
    ],
)
def test_the_other_recipes_run_as_deployments(
    r1flow: Installation, recipe: dict[str, Any], deployment: str, own: set[str]
) -> None:
    r1flow.wait_for(r1flow.start(f"{deployment}/{deployment}"), "Completed")
    for stage in own:
        runs = r1flow.stage(stage)
        assert runs and {(run["work_pool_name"], run["state"]["name"]) for run in runs} == {("r1-gpu", "Completed")}
    assert len(r1flow.stage("cold_start_data")) == 1  # shared with R1


def test_the_command_in_a_terminal_finds_all_of_it_made(r1flow: Installation, recipe: dict[str, Any]) -> None:
    result = r1flow.tiny("run", "--dispatch")
    assert {stage["status"] for stage in result["stages"]} == {"reused"}
    assert len(r1flow.stage("sft")) == 1


def test_a_forced_stage_is_made_once_more(r1flow: Installation, recipe: dict[str, Any]) -> None:
    result = r1flow.tiny("run", "--dispatch", "--only", "problems", "--force", "problems")
    (stage,) = result["stages"]
    assert stage["status"] == "ran"
    attempts = list((r1flow.home / "artifacts" / "problems" / stage["key"]).iterdir())
    assert sorted(path.name for path in attempts) == ["1", "2"]


def test_stages_wait_in_the_queue_of_their_recipe(r1flow: Installation, recipe: dict[str, Any]) -> None:
    assert {run["work_queue_name"] for stage in STAGES for run in r1flow.stage(stage)} == {"interactive"}
    id = r1flow.start("train-r1/train-r1-weekly", "problems.held_out_max=21", only="problems")
    assert r1flow.wait_for(id, "Completed")["work_queue_name"] == "scheduled"
    assert r1flow.stage("problems")[-1]["work_queue_name"] == "scheduled"


def test_a_stages_own_error_is_the_recipes(r1flow: Installation, recipe: dict[str, Any], tmp_path: Path) -> None:
    """One line, exit code 2, no second try."""
    rows = tmp_path / "problems.jsonl"
    rows.write_text(json.dumps({"prompt": "1 + 1"}) + "\n")
    source = f"problems.sources=[{{kind='file', path='{rows}'}}]"
    before = len(r1flow.stage("problems"))
    done = r1flow("run", "tiny", "--set", source, "--only", "problems", "--dispatch")
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: problems: ") and str(rows) in last
    assert len(r1flow.stage("problems")) == before + 1


def test_a_pool_without_workers_is_named_and_waited_for(r1flow: Installation, recipe: dict[str, Any]) -> None:
    r1flow.ask("PATCH", "/work_pools/r1-tasks", is_paused=True)
    id = r1flow.start("train-r1/train-r1", "problems.held_out_max=20", only="problems")
    (run,) = r1flow.wait(lambda: [r for r in r1flow.stage("problems") if r["state"]["type"] == "SCHEDULED"], "stage")
    said = r1flow.wait(lambda: _said(r1flow, "problems waits: work pool 'r1-tasks' is paused"), "the line")
    assert "prefect work-pool resume r1-tasks" in said
    r1flow.ask("PATCH", "/work_pools/r1-tasks", is_paused=False)
    r1flow.wait_for(id, "Completed")
    assert r1flow.run(run["id"])["state"]["name"] == "Completed"


def _said(r1flow: Installation, line: str) -> str | None:
    """A line of the recipe's process, which its worker logs."""
    text = (r1flow.home / "logs" / "worker-r1-cpu.log").read_text()
    return next((said for said in text.splitlines() if line in said), None)
