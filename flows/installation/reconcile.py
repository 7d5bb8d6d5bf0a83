"""Compares the desired resources with those on a Prefect server, and creates or updates those that differ."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    GlobalConcurrencyLimitCreate,
    GlobalConcurrencyLimitUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, DeploymentFilterTags
from prefect.client.schemas.objects import WorkQueue
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound

from flows.installation.resources import Resource, automation_fields
from grpo.errors import InputError
from tasks.store.diff import Change, changed_fields


@dataclass(frozen=True)
class ResourceDiff:
    """A desired resource and the server's `old` version of it, None if the server has none. `retired`: a resource of an
    earlier version, to be deleted."""

    resource: Resource
    old: Resource | None
    retired: bool = False

    @property
    def changes(self) -> list[Change]:
        """(field, old, new) of every leaf that differs."""
        return changed_fields(self.old.fields, self.resource.fields) if self.old else []

    @property
    def status(self) -> str:
        if self.retired:
            return "delete"
        return "create" if self.old is None else "change" if self.changes else "unchanged"


async def compare(client: PrefectClient, resources: Iterable[Resource]) -> list[ResourceDiff]:
    """The differences between the desired resources and the server's.

    Raises:
        InputError: a pool exists with another type, which Prefect cannot change.
    """
    diffs = []
    resources = list(resources)
    for resource in resources:
        old = await _READ[resource.kind](client, resource)
        diffs.append(
            ResourceDiff(_with_server_defaults(resource, old) if resource.kind == "pool" and old else resource, old)
        )
    current = {resource.fields["entrypoint"] for resource in resources if resource.kind == "deployment"}
    retired = await _read_retired(client, current)
    return [*(_still_switched(diff, retired) for diff in diffs), *(ResourceDiff(one, one, True) for one in retired)]


RETIRED = {"weekly", "nightly-evaluation", "r1flow"}
"""Names of deployments in earlier versions, where all of them were called r1flow."""


async def _read_retired(client: PrefectClient, current: Collection[str]) -> list[Resource]:
    """Deployments that an earlier version registered under other names: their entrypoints are modules of this package
    that are gone. One with a `current` entrypoint, or another's, is somebody's own."""
    named = DeploymentFilter(
        name=DeploymentFilterName(any_=sorted(RETIRED)), tags=DeploymentFilterTags(all_=["r1flow"])
    )
    flows = {flow.id: flow.name for flow in await client.read_flows(deployment_filter=named)}
    found = await client.read_deployments(deployment_filter=named)
    return [
        Resource(
            "deployment", f"{flows[old.flow_id]}/{old.name}", {}, {"active": {s.slug: s.active for s in old.schedules}}
        )
        for old in found
        if (old.entrypoint or "").startswith("flows.") and old.entrypoint not in current
    ]


def _still_switched(diff: ResourceDiff, retired: Iterable[Resource]) -> ResourceDiff:
    """A renamed deployment, with its schedules active or paused as under the old name."""
    if diff.old is not None or not diff.resource.fields.get("schedules"):
        return diff
    flow = diff.resource.name.split("/")[0]
    before: dict[str, bool] = {}
    for old in retired:
        before |= old.switches["active"] if old.name.split("/")[0] == flow else {}
    active = {slug: before.get(slug, switch) for slug, switch in diff.resource.switches["active"].items()}
    return replace(diff, resource=replace(diff.resource, switches={"active": active}))


def _with_server_defaults(pool: Resource, old: Resource) -> Resource:
    """The desired pool, with the server's default for each variable that the server knows, because users set image,
    volumes and nodes of their cluster in the UI."""
    server_type, desired_type = old.fields["type"], pool.fields["type"]
    if server_type != desired_type:
        raise InputError(
            f"work pool {pool.name!r} exists and is of type {server_type}; give --pools {server_type}, or delete it "
            f"first: prefect work-pool delete {pool.name}"
        )
    template = deepcopy(pool.fields["base_job_template"])
    server_variables = old.fields["base_job_template"].get("variables", {}).get("properties", {})
    for name, variable in template["variables"]["properties"].items():
        if name in server_variables:
            variable.pop("default", None)
            variable |= {"default": server_variables[name]["default"]} if "default" in server_variables[name] else {}
    if credentials := pool.switches.get("credentials"):
        env = template["variables"]["properties"]["env"]
        env["default"] = {**env.get("default", {}), **credentials}
    return replace(pool, fields={**pool.fields, "base_job_template": template})


async def apply(client: PrefectClient, diffs: Iterable[ResourceDiff]) -> None:
    """Creates or updates the resources that differ, in the given order, and deletes those of an earlier version."""
    for diff in diffs:
        if diff.retired:
            await client.delete_deployment((await client.read_deployment_by_name(diff.resource.name)).id)
        elif diff.status != "unchanged":
            await _WRITE[diff.resource.kind](client, diff)


async def _read_pool(client: PrefectClient, resource: Resource) -> Resource | None:
    try:
        pool = await client.read_work_pool(resource.name)
    except ObjectNotFound:
        return None
    fields = {"type": pool.type, "description": pool.description, "base_job_template": pool.base_job_template}
    return Resource("pool", resource.name, fields)


async def _write_pool(client: PrefectClient, diff: ResourceDiff) -> None:
    name, fields = diff.resource.name, diff.resource.fields
    if diff.old is None:
        await client.create_work_pool(WorkPoolCreate(name=name, **fields))
        return
    update = WorkPoolUpdate(description=fields["description"], base_job_template=fields["base_job_template"])
    await client.update_work_pool(name, update)


async def _queue(client: PrefectClient, resource: Resource) -> WorkQueue | None:
    pool, name = resource.name.split("/")
    try:
        return next((q for q in await client.read_work_queues(pool) if q.name == name), None)
    except ObjectNotFound:
        return None


async def _read_queue(client: PrefectClient, resource: Resource) -> Resource | None:
    queue = await _queue(client, resource)
    if queue is None:
        return None
    return Resource("queue", resource.name, {"priority": queue.priority, "description": queue.description})


async def _write_queue(client: PrefectClient, diff: ResourceDiff) -> None:
    # Read again, because creating a pool changes the priorities of its queues.
    queue = await _queue(client, diff.resource)
    pool, name = diff.resource.name.split("/")
    if queue is None:
        await client.create_work_queue(name, work_pool_name=pool, **diff.resource.fields)
    else:
        await client.update_work_queue(queue.id, **diff.resource.fields)


async def _read_deployment(client: PrefectClient, resource: Resource) -> Resource | None:
    try:
        deployment = await client.read_deployment_by_name(resource.name)
    except ObjectNotFound:
        return None
    # The UI gives no slug to a schedule that is added there.
    named = {schedule.slug or f"#{number}": schedule for number, schedule in enumerate(deployment.schedules)}
    schedules = {
        slug: {**schedule.schedule.model_dump(mode="json"), "parameters": schedule.parameters}
        for slug, schedule in named.items()
    }
    fields = {name: getattr(deployment, name) for name in resource.fields if name != "schedules"}
    fields |= {"schedules": schedules, "tags": sorted(deployment.tags), "pull_steps": deployment.pull_steps or []}
    active = {slug: schedule.active for slug, schedule in named.items()}
    return Resource("deployment", resource.name, fields, {"active": active})


async def _write_deployment(client: PrefectClient, diff: ResourceDiff) -> None:
    """Creates or replaces a deployment and its schedules. Existing schedules stay active or paused as they are."""
    fields = dict(diff.resource.fields)
    active = {**diff.resource.switches["active"], **(diff.old.switches["active"] if diff.old else {})}
    schedules = []
    for slug, values in fields.pop("schedules").items():
        made = {
            "schedule": {name: value for name, value in values.items() if name != "parameters"},
            "slug": None if slug.startswith("#") else slug,
            "active": active[slug],
            "parameters": values["parameters"],
        }
        schedules.append(DeploymentScheduleCreate.model_validate(made))
    flow, name = diff.resource.name.split("/")
    flow_id = await client.create_flow_from_name(flow)
    await client.create_deployment(flow_id=flow_id, name=name, schedules=schedules, **fields)


async def _read_limit(client: PrefectClient, resource: Resource) -> Resource | None:
    try:
        limit = await client.read_global_concurrency_limit_by_name(resource.name)
    except ObjectNotFound:
        return None
    return Resource("limit", resource.name, {"limit": limit.limit})


async def _write_limit(client: PrefectClient, diff: ResourceDiff) -> None:
    name, slots = diff.resource.name, diff.resource.fields["limit"]
    if diff.old is None:
        await client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=slots))
    else:
        await client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(limit=slots))


async def _read_automation(client: PrefectClient, resource: Resource) -> Resource | None:
    automations = await client.read_automations_by_name(resource.name)
    return Resource("automation", resource.name, automation_fields(automations[0])) if automations else None


async def _write_automation(client: PrefectClient, diff: ResourceDiff) -> None:
    name, fields = diff.resource.name, diff.resource.fields
    if diff.old is None:
        await client.create_automation(AutomationCore(name=name, **fields, **diff.resource.switches))
        return
    (automation, *_) = await client.read_automations_by_name(name)
    await client.update_automation(automation.id, AutomationCore(name=name, **fields, enabled=automation.enabled))


_READ: dict[str, Callable[[PrefectClient, Resource], Awaitable[Resource | None]]] = {
    "pool": _read_pool,
    "queue": _read_queue,
    "deployment": _read_deployment,
    "automation": _read_automation,
    "limit": _read_limit,
}
_WRITE: dict[str, Callable[[PrefectClient, ResourceDiff], Awaitable[None]]] = {
    "pool": _write_pool,
    "queue": _write_queue,
    "deployment": _write_deployment,
    "automation": _write_automation,
    "limit": _write_limit,
}
