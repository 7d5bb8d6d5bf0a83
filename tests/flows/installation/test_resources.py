"""The resources in deployments/: a deployment for every flow, forms, pools that cannot wait for each other."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import jinja2
import pytest
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.steps.core import run_steps
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.utilities.schema_tools import validate
from prefect.utilities.templating import apply_values

from flows.installation.resources import FOLDER, Resource, _read, desired, entrypoint_of, form_values, load
from flows.prefect_flows import RECIPE_FLOWS
from flows.recipe.form_groups import GROUPS, OBJECTIVES
from flows.recipe.load import load_recipe, shipped
from flows.stage_flows import STAGE_FLOWS
from flows.stage_graphs import GRAPHS
from flows.stages.evaluate import CHECKPOINTS
from grpo.config.supervised import SFT
from grpo.errors import InputError
from grpo.rewards.verifiers import VERIFIERS
from tasks.estimate.origin import code_version
from tests.support.r1 import ROOT

TAG = "r1flow"


@pytest.fixture(scope="module")
def resources() -> list[Resource]:
    return desired("process")


def deployments(resources: list[Resource]) -> dict[str, dict[str, Any]]:
    return {resource.name: resource.fields for resource in resources if resource.kind == "deployment"}


def stage_flows() -> set[str]:
    """Entrypoints of all stages of all graphs."""
    recipes = [load_recipe("tiny"), load_recipe("tiny", ["alignment.rounds=2"])]
    names = {step.flow_name for graph in GRAPHS.values() for recipe in recipes for step in graph(recipe)}
    return {entrypoint_of(STAGE_FLOWS[name]) for name in names}


def test_every_flow_has_exactly_one_deployment_that_it_titles(resources: list[Resource]) -> None:
    listed = [f["entrypoint"] for name, f in deployments(resources).items() if len(set(name.split("/"))) == 1]
    assert sorted(listed) == sorted(stage_flows() | {entrypoint_of(flow) for flow in RECIPE_FLOWS.values()})


def test_a_deployment_has_the_name_of_its_flow_and_nothing_of_who_deploys(resources: list[Resource]) -> None:
    for name, fields in deployments(resources).items():
        assert name.split("/")[0] == load(fields["entrypoint"]).name
        assert fields["pull_steps"] == [] and ":" not in fields["entrypoint"]
        assert TAG in fields["tags"] and fields["description"]
    assert _read(FOLDER / "prefect.yaml")["pull"] == []  # left out, the command of Prefect pins a folder


def test_titles_tell_recipes_from_stages_and_show_no_internals(resources: list[Resource]) -> None:
    titles = [name.split("/")[1] for name in deployments(resources)]
    assert len(titles) == len(set(titles)) == 6 + 2 + 15  # recipes, schedules, stages
    recipes = {name.split("/")[0] for name, f in deployments(resources).items() if "recipe" in f["tags"]}
    assert len(recipes) == 6 and all(name.startswith("train-") for name in recipes)
    assert not [title for title in titles if "round" in title or title in ("gate", "student_base")]


async def steps_output() -> dict[str, Any]:
    return await run_steps(_read(FOLDER / "prefect.yaml")["build"], {}, print_function=lambda *_, **__: None)


def test_prefects_own_command_fills_in_the_same_values(resources: list[Resource]) -> None:
    """By Prefect's own steps and templates, without a server."""
    outputs = asyncio.run(steps_output())
    for entry in _read(FOLDER / "prefect.yaml")["deployments"]:
        filled = apply_values(entry, outputs)
        fields = deployments(resources)[f"{load(entry['entrypoint']).name}/{entry['name']}"]
        assert (filled["version"], filled["parameters"]) == (fields["version"], fields["parameters"])
        assert filled["tags"] == fields["tags"] and fields["version"] == code_version()


def test_who_waits_never_holds_the_slot_of_whom_it_waits_for(resources: list[Resource]) -> None:
    recipes = {entrypoint_of(flow) for flow in RECIPE_FLOWS.values()}
    waiting = {f["work_pool_name"] for f in deployments(resources).values() if f["entrypoint"] in recipes}
    working = {f["work_pool_name"] for f in deployments(resources).values() if f["entrypoint"] not in recipes}
    assert waiting == {"r1-cpu"} and working == {"r1-tasks", "r1-gpu"}


def test_pools_and_queues_of_all_deployments_exist(resources: list[Resource]) -> None:
    names = {resource.name for resource in resources if resource.kind in ("pool", "queue")}
    for fields in deployments(resources).values():
        assert {fields["work_pool_name"], f"{fields['work_pool_name']}/{fields['work_queue_name']}"} <= names


def test_people_go_before_schedules(resources: list[Resource]) -> None:
    queues = {resource.name: resource.fields["priority"] for resource in resources if resource.kind == "queue"}
    for pool in ("r1-cpu", "r1-tasks", "r1-gpu"):
        assert queues[f"{pool}/interactive"] < queues[f"{pool}/scheduled"]
    for fields in deployments(resources).values():
        assert fields["work_queue_name"] == ("scheduled" if fields["schedules"] else "interactive")


def test_schedules_are_inactive_and_run_the_paper_recipe(resources: list[Resource]) -> None:
    scheduled = {resource.name: resource for resource in resources if resource.fields.get("schedules")}
    assert set(scheduled) == {"train-r1/train-r1-weekly", "train-r1/train-r1-nightly-evaluation"}
    for resource in scheduled.values():
        assert not any(resource.switches["active"].values())
        load_recipe(resource.fields["parameters"]["recipe"])
    (weekly,) = scheduled["train-r1/train-r1-weekly"].fields["schedules"].values()
    dates = CronSchedule(cron=weekly["cron"], timezone=weekly["timezone"])
    assert (dates.cron, dates.timezone) == ("0 3 * * 6", "UTC")


def test_a_recipes_form_is_ordered_explained_and_bounded(resources: list[Resource]) -> None:
    fields = deployments(resources)["train-r1/train-r1"]["parameter_openapi_schema"]["properties"]
    by_position = sorted(fields, key=lambda name: fields[name]["position"])
    assert by_position[:4] == ["recipe", "overrides", "seed", "start"]
    assert all(field["description"] for field in fields.values())
    assert fields["recipe"]["default"] == "tiny" and fields["recipe"]["enum"] == shipped()
    seed = fields["seed"]  # empty is no number, and no switch between a number and nothing
    assert (seed["type"], seed["minimum"]) == ("integer", 0) and not seed.keys() & {"anyOf", "default"}
    assert fields["overrides"]["type"] == "array"


def test_a_stages_form_knows_the_sections_fields_and_starts_from_a_recipe(resources: list[Resource]) -> None:
    sft = deployments(resources)["sft/sft"]
    schema = sft["parameter_openapi_schema"]
    assert schema["required"] == ["config"]
    assert schema["properties"]["inputs"]["description"].startswith("What the stage reads")
    described = schema["definitions"]["SFT"]["properties"]["epochs"]
    assert described["description"].startswith("Passes over the data") and described["minimum"] == 1
    assert [schema["properties"][name]["position"] for name in ("inputs", "seed", "config", "where")] == [0, 1, 2, 3]
    assert SFT.model_validate(sft["parameters"]["config"]) == load_recipe("tiny").sft
    student = deployments(resources)["student/student"]["parameters"]
    first = load_recipe("tiny").distill.students[0]  # type: ignore[union-attr]
    assert (student["name"], SFT.model_validate(student["config"])) == (first.name, first.sft)


def test_stages_are_chosen_from_those_of_the_recipes_graph(resources: list[Resource]) -> None:
    for name, of_it in (("train-r1", "alignment_rl_2"), ("train-rlhf-ppo", "rlhf_ppo"), ("train-dev1", "r1_zero")):
        fields = deployments(resources)[f"{name}/{name}"]["parameter_openapi_schema"]["properties"]
        stages = fields["start"]["enum"]
        assert stages[:2] == ["problems", "base"] and of_it in stages
        assert fields["only"]["enum"] == fields["force"]["items"]["enum"] == stages


def test_stages_that_a_recipe_names_can_be_written_where_others_are_chosen(resources: list[Resource]) -> None:
    distill = deployments(resources)["train-distill/train-distill"]["parameter_openapi_schema"]
    listed, another = distill["properties"]["start"]["anyOf"]
    assert {"problems", "sft_data", "base_small", "student_smallest", "evaluate"} <= set(listed["enum"])
    assert distill["properties"]["force"]["items"]["anyOf"] == [listed, another]
    for name in ("base_qwen-7b", "student_qwen-7b"):
        validate({"start": name, "only": name, "force": [name, "sft_data"]}, distill, raise_on_error=True)
    assert len(validate({"start": "sft"}, distill)) == 1
    evaluate = deployments(resources)["evaluate/evaluate"]["parameter_openapi_schema"]
    chosen = evaluate["properties"]["stages"]["items"]["anyOf"][0]["enum"]
    assert chosen == [*CHECKPOINTS, "reward_models"]
    config = deployments(resources)["evaluate/evaluate"]["parameters"]["config"]
    ours = [*chosen, "student_mine", "alignment_rl_7"]
    validate({"config": config, "stages": ours}, evaluate, raise_on_error=True)
    assert len(validate({"config": config, "stages": ["problems"]}, evaluate)) == 1


def test_methods_engines_and_verifiers_are_lists_to_choose_from(resources: list[Resource]) -> None:
    models = definitions(resources)
    assert models["RL"]["properties"]["method"]["enum"] == ["grpo", "ppo", "online_rft", "rft", "dpo", "sft"]
    assert models["VLLM"]["properties"]["kind"]["enum"] == ["local", "server"]
    assert models["RL"]["properties"]["engine"]["anyOf"][0] == {"$ref": "#/definitions/VLLM"}
    for section in ("ColdStartData", "SFTData", "RewardModels", "Teacher"):
        engines = models[section]["properties"]["engine"]["anyOf"][0]["discriminator"]["mapping"]
        assert sorted(engines) == ["endpoint", "function", "local", "server"], section
    for source in ("FileSource", "HubSource", "MixSource"):
        assert models[source]["properties"]["verifier"]["enum"] == list(VERIFIERS), source


def definitions(resources: list[Resource]) -> dict[str, Any]:
    """The models in all forms, by name."""
    schemas = [fields["parameter_openapi_schema"] for fields in deployments(resources).values()]
    return {name: model for schema in schemas for name, model in schema.get("definitions", {}).items()}


def test_large_sections_show_the_usual_settings_first_and_the_others_by_subject(resources: list[Resource]) -> None:
    models = definitions(resources)
    for name, groups in GROUPS.items():
        assert list(models[name]["properties"]) == [field for fields in groups.values() for field in fields], name
    assert {name for name, model in models.items() if len(model.get("properties", {})) > 14} <= GROUPS.keys() | {
        "MixSource"
    }
    fields = models["RL"]["properties"]
    assert [field["position"] for field in fields.values()] == list(range(len(fields)))
    assert fields["steps"]["title"] == "Steps" and fields["clip_eps_low"]["title"] == "Loss · Clip Eps Low"
    assert fields["hardware"]["title"] == "Hardware · Hardware"


def test_objectives_are_a_list_to_choose_from(resources: list[Resource]) -> None:
    assert definitions(resources)["RL"]["properties"]["objective"]["enum"] == list(OBJECTIVES)
    tree = ast.parse((ROOT / "grpo/algorithms/objectives.py").read_text())  # importing it loads torch
    table = next(
        n.value for n in tree.body if isinstance(n, ast.AnnAssign) and getattr(n.target, "id", "") == "OBJECTIVES"
    )
    assert isinstance(table, ast.Dict) and [ast.literal_eval(key) for key in table.keys if key] == list(OBJECTIVES)


def test_every_field_of_every_form_refuses_secrets_and_no_other_field_is_taken(resources: list[Resource]) -> None:
    for name, fields in deployments(resources).items():
        form = fields["parameter_openapi_schema"]
        rules = {field: shown.get("then", {}).get("$ref") for field, shown in form["properties"].items()}
        assert rules and {*rules.values()} == {"#/definitions/AnySetting"}, (name, rules)
        assert form["additionalProperties"] is False


def test_help_names_no_files(resources: list[Resource]) -> None:
    for name, fields in deployments(resources).items():
        assert (
            re.findall(
                r"[\w/]+\.(?:py|md|jsonl?|parquet|toml|yaml|csv|txt)\b", json.dumps(fields["parameter_openapi_schema"])
            )
            == []
        ), name


def as_sent(model: dict[str, Any], values: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    """The parameters that a form sends: its values, and defaults of fields that they leave out, all the way down."""
    sent = {name: field["default"] for name, field in model["properties"].items() if "default" in field} | values
    for name, field in model["properties"].items():
        if name in sent and isinstance(sent[name], dict) and "$ref" in field:
            sent[name] = as_sent(models[field["$ref"].rpartition("/")[2]], sent[name], models)
    return sent


@pytest.mark.parametrize("recipe", ["tiny", "qwen2.5-1.5b"])
def test_every_stages_form_as_it_opens_is_taken_and_means_the_recipes_section(recipe: str) -> None:
    forms = {n: f for n, f in deployments(desired("process", recipe)).items() if "config" in f["parameters"]}
    assert {"sft/sft", "sft_data/sft_data", "evaluate/evaluate"} <= set(forms)
    for name, fields in forms.items():
        schema = fields["parameter_openapi_schema"]
        sent = as_sent(schema, fields["parameters"], schema["definitions"])
        validate(sent, schema, raise_on_error=True)
        flow = load(fields["entrypoint"])
        section = flow.validate_parameters(fields["parameters"])["config"]
        assert flow.validate_parameters(sent)["config"] == section, name


def test_forms_of_a_recipe_without_students_are_left_empty() -> None:
    assert "flows.stage_flows.student" not in form_values(load_recipe("r1-paper"))
    assert (
        form_values(load_recipe("r1-paper"))["flows.stage_flows.sft"]["config"]["epochs"]
        == load_recipe("r1-paper").sft.epochs
    )


def test_silence_ends_with_every_state_that_a_stage_ends_in(resources: list[Resource]) -> None:
    lost = next(t for t in resources if t.name == "r1flow heartbeat lost").fields["trigger"]
    assert (lost["posture"], lost["within"], lost["for_each"]) == ("Proactive", 90.0, ["prefect.resource.id"])
    for state in ("Completed", "Reused", "Failed", "Crashed", "Cancelled", "Suspended"):
        assert f"prefect.flow-run.{state}" in lost["expect"]


@pytest.mark.parametrize(("tags", "ours"), [(["r1flow", "stage"], True), (["someone-elses"], False), ([], False)])
def test_only_runs_that_beat_as_often_are_taken_for_lost(
    resources: list[Resource], tags: list[str], ours: bool
) -> None:
    fields = next(t for t in resources if t.name == "r1flow heartbeat lost").fields["trigger"]
    related = [{"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"} for tag in tags]
    event = ReceivedEvent(
        occurred=datetime.now(UTC),
        event="prefect.flow-run.heartbeat",
        resource={"prefect.resource.id": "prefect.flow-run.7"},
        related=related,
        id=uuid4(),
    )
    trigger = EventTrigger.model_validate(fields)
    assert trigger.covers(event) == ours
    assert all(TAG in fields["tags"] for fields in deployments(resources).values())


BLOCK = "00000000-0000-0000-0000-000000000007"


def test_notifications_need_a_block() -> None:
    without, with_one = ([t for t in desired("process", notify=b) if t.kind == "automation"] for b in (None, BLOCK))
    assert len(with_one) == len(without) + 1
    told = next(t for t in with_one if t.name == "r1flow crashed or failed")
    assert told.fields["actions"][0]["block_document_id"] == BLOCK


@pytest.mark.parametrize(
    ("url", "line"),
    [("http://here/1", "http://here/1"), (None, "No link: the Prefect server has no PREFECT_UI_URL.")],
)
def test_a_notification_says_so_if_the_server_does_not_know_its_address(url: str | None, line: str) -> None:
    told = next(t for t in desired("process", notify=BLOCK) if t.name == "r1flow crashed or failed")
    templates = jinja2.Environment()
    templates.filters["ui_url"] = lambda run: url  # what Prefect's filter gives
    message = templates.from_string(told.fields["actions"][0]["body"]).render(flow={}, flow_run={"state": {}})
    assert message.strip().splitlines()[-1] == line


def test_an_entrypoint_that_is_no_flow_is_one_line() -> None:
    with pytest.raises(InputError, match=r"flows.prefect_flows.train_r2: no such flow"):
        load("flows.prefect_flows.train_r2")


def test_an_unknown_type_of_work_pool_is_one_line() -> None:
    with pytest.raises(InputError, match=r"^--pools ecs: no such type of work pool; there are docker, kubernetes, pro"):
        desired("ecs")
