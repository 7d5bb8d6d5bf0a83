"""The resources described in deployments/: pools, queues, deployments with schedules, automations, a GPU limit.

Each is a `Resource` of plain values, so that it can be compared with the server's.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.schemas.automations import AutomationCore
from prefect.utilities.callables import parameter_schema
from prefect.utilities.templating import apply_values
from pydantic import BaseModel, ConfigDict, ValidationError

from flows.home import GPU_LIMIT
from flows.recipe.load import load_recipe
from flows.recipe.schema import Recipe
from flows.stage_flows import STAGE_FLOWS
from flows.stage_graphs import GRAPHS
from grpo.errors import InputError
from tasks.estimate.origin import code_version

FOLDER = Path(__file__).parents[2] / "deployments"
"""Next to the package flows, both in a checkout and in an installation."""


@dataclass(frozen=True)
class Resource:
    """A pool, queue, deployment, automation or limit. `switches` are applied only at creation; after that, the server's
    values stay."""

    kind: Literal["pool", "queue", "deployment", "automation", "limit"]
    name: str
    fields: dict[str, Any]
    switches: dict[str, Any] = field(default_factory=dict)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _WorkPool(_File):
    name: str
    work_queue_name: str
    job_variables: dict[str, Any] = {}


class _Schedule(_File):
    slug: str
    cron: str
    timezone: str = "UTC"
    active: bool = False
    parameters: dict[str, Any] = {}


class _Deployment(_File):
    name: str
    entrypoint: str
    version: str
    work_pool: _WorkPool
    tags: list[str]
    enforce_parameter_schema: bool
    description: str | None = None
    parameters: dict[str, Any] = {}
    schedules: list[_Schedule] = []


class _Pool(_File):
    description: str
    defaults: dict[str, Any] = {}


class _Pools(_File):
    type: str
    pools: dict[str, _Pool]
    template: dict[str, Any]


class _Queue(_File):
    priority: int
    description: str


def desired(
    pools: str,
    recipe: str = "tiny",
    notify: str | None = None,
    folder: Path = FOLDER,
    gpus: int | None = None,
    credentials: Mapping[str, str] | None = None,
) -> list[Resource]:
    """All resources, in an order in which they can be created. Forms of stages are filled with values of `recipe`.

    `pools` is a type of work pool that has a file in `folder`/pools. `notify` is the id of the block that sends
    notifications (None: no notification automation). `gpus` is the number of slots of the GPU limit (None: unchanged).
    `credentials` go into the environment of all pools: variable -> a Prefect template that a worker fills in from a
    block. Raises InputError for an unknown type, or a file that cannot be read.
    """
    types = sorted(path.stem for path in (folder / "pools").glob("*.yaml"))
    if pools not in types:
        raise InputError(f"--pools {pools}: no such type of work pool; there are {', '.join(types)}")
    file = _Pools.model_validate(_read(folder / "pools" / f"{pools}.yaml"))
    queues = {name: _Queue.model_validate(values) for name, values in _read(folder / "queues.yaml").items()}
    return [
        *_pools(file, credentials or {}),
        *(
            Resource("queue", f"{pool}/{name}", queue.model_dump())
            for pool in file.pools
            for name, queue in queues.items()
        ),
        *_deployments(apply_values(_read(folder / "prefect.yaml")["deployments"], {"r1flow": build_step(recipe)})),
        *_automations(_read(folder / "automations.yaml")["automations"], notify),
        *([Resource("limit", GPU_LIMIT, {"limit": gpus})] if gpus is not None else []),
    ]


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; install r1flow again") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def _pools(file: _Pools, credentials: Mapping[str, str]) -> Iterator[Resource]:
    for name, pool in file.pools.items():
        template = deepcopy(file.template)
        for variable, default in pool.defaults.items():
            template["variables"]["properties"][variable]["default"] = default
        if credentials:
            if "env" not in template["variables"]["properties"]:
                raise InputError(f"--credential: the job template of {file.type} has no variable env; add one")
            env = template["variables"]["properties"]["env"]
            env["default"] = {**env.get("default", {}), **credentials}
        fields = {"type": file.type, "description": pool.description, "base_job_template": template}
        yield Resource("pool", name, fields, {"credentials": credentials})


def _deployments(entries: list[dict[str, Any]]) -> Iterator[Resource]:
    for values in entries:
        try:
            deployment = _Deployment.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InputError(f"prefect.yaml: {values.get('entrypoint')}: {where}: {first['msg']}") from None
        flow = load(deployment.entrypoint)
        form = parameter_schema(flow).model_dump(exclude_unset=True)
        fields = {
            "entrypoint": deployment.entrypoint,
            "version": deployment.version,
            "description": deployment.description or flow.description or "",
            "tags": sorted(deployment.tags),
            "work_pool_name": deployment.work_pool.name,
            "work_queue_name": deployment.work_pool.work_queue_name,
            "job_variables": deployment.work_pool.job_variables,
            "parameters": deployment.parameters,
            "schedules": {s.slug: {**_cron(s), "parameters": s.parameters} for s in deployment.schedules},
            # Prefect's own command has no rule for parameters that a flow lacks, and would store them.
            "parameter_openapi_schema": {**form, "additionalProperties": False},
            "enforce_parameter_schema": deployment.enforce_parameter_schema,
            "pull_steps": [],
        }
        active = {s.slug: s.active for s in deployment.schedules}
        yield Resource("deployment", f"{flow.name}/{deployment.name}", fields, {"active": active})


def build_step(recipe: str = "tiny") -> dict[str, Any]:
    """What prefect.yaml refers to as `r1flow`: the version of the code, and for each deployment the initial values of
    its form. Prefect's own command calls this as a build step."""
    filled = form_values(load_recipe(recipe))
    entries = _read(FOLDER / "prefect.yaml")["deployments"]
    return {
        "version": code_version(),
        "forms": {entry["name"]: filled.get(entry["entrypoint"], {}) for entry in entries},
    }


def _cron(schedule: _Schedule) -> dict[str, Any]:
    return CronSchedule(cron=schedule.cron, timezone=schedule.timezone).model_dump(mode="json")


def load(entrypoint: str) -> Any:
    """The flow at an entrypoint such as package.module.function."""
    module, _, name = entrypoint.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        raise InputError(f"prefect.yaml: {entrypoint}: no such flow; write package.module.function") from None


def form_values(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Entrypoint of a stage -> initial values of its form: the recipe's section (for students, the first student's)."""
    forms: dict[str, dict[str, Any]] = {}
    for graph in GRAPHS.values():
        try:
            for step in graph(recipe):
                values = {"config": _form_value(step.config(recipe)), **step.parameters, "seed": recipe.seed}
                forms.setdefault(entrypoint_of(STAGE_FLOWS[step.flow_name]), values)
        except InputError:
            continue  # the recipe lacks a section that this graph needs
    return forms


def _form_value(section: BaseModel) -> dict[str, Any]:
    """Only the fields that the recipe sets. The form shows the defaults of the others."""
    return section.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def entrypoint_of(flow: Any) -> str:
    """A flow's entrypoint, package.module.function."""
    return f"{flow.fn.__module__}.{flow.fn.__name__}"


def _automations(entries: list[Mapping[str, Any]], notify: str | None) -> Iterator[Resource]:
    for values in entries:
        actions = [dict(action) for action in values["actions"]]
        for action in actions:
            if action["type"] == "send-notification":
                action["block_document_id"] = notify
        if any(action.get("block_document_id", "") is None for action in actions):
            continue
        automation = AutomationCore.model_validate({**values, "actions": actions})
        yield Resource("automation", automation.name, automation_fields(automation), {"enabled": automation.enabled})


def automation_fields(automation: AutomationCore) -> dict[str, Any]:
    """The fields of an automation that are compared, as plain values. Sets of events are sorted."""
    return _ordered(automation.model_dump(mode="json", include={"description", "trigger", "actions"}))


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _ordered(v) for k, v in value.items()}
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return sorted(value)
    return [_ordered(item) for item in value] if isinstance(value, list) else value
