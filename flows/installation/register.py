"""What a Prefect server has of what is wanted, the difference, and how it is made up: through Prefect's client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.objects import WorkQueue
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound

from flows.installation.desired import Thing, automation_fields
from grpo.errors import InputError
from tasks.store.diff import Change, changed_fields


@dataclass(frozen=True)
class Difference:
    """A thing beside what the server has. `old` is None where it has nothing."""

    thing: Thing
    old: Thing | None

    @property
    def changes(self) -> list[Change]:
        """(field, old, new) of every leaf that differs."""
        return changed_fields(self.old.fields, self.thing.fields) if self.old else []

    @property
    def status(self) -> str:
        return "create" if self.old is None else "change" if self.changes else "unchanged"


async def compare(client: PrefectClient, things: Iterable[Thing]) -> list[Difference]:
    """What would have to be done.

    Raises:
        InputError: where a pool has another type than is wanted, which Prefect cannot change.
    """
    found = []
    for thing in things:
        old = await _READ[thing.kind](client, thing)
        found.append(Difference(_with_its_defaults(thing, old) if thing.kind == "pool" and old else thing, old))
    return found


def _with_its_defaults(pool: Thing, old: Thing) -> Thing:
    """The pool as wanted, but each variable that the server knows with the default that it has there: image, volumes
    and nodes are what people set in the UI for their cluster."""
    is_now, shall = old.fields["type"], pool.fields["type"]
    if is_now != shall:
        raise InputError(
            f"work pool {pool.name!r} exists and is of type {is_now}; give --pools {is_now}, or delete it first: "
            f"prefect work-pool delete {pool.name}"
        )
    template = deepcopy(pool.fields["base_job_template"])
    known = old.fields["base_job_template"].get("variables", {}).get("properties", {})
    for name, variable in template["variables"]["properties"].items():
        if name in known:
            variable.pop("default", None)
            variable |= {"default": known[name]["default"]} if "default" in known[name] else {}
    return replace(pool, fields={**pool.fields, "base_job_template": template})


async def apply(client: PrefectClient, differences: Iterable[Difference]) -> None:
    """Create and change what differs, in the order given."""
    for difference in differences:
        if difference.status != "unchanged":
            await _WRITE[difference.thing.kind](client, difference)


async def _read_pool(client: PrefectClient, thing: Thing) -> Thing | None:
    try:
        pool = await client.read_work_pool(thing.name)
    except ObjectNotFound:
        return None
    fields = {"type": pool.type, "description": pool.description, "base_job_template": pool.base_job_template}
    return Thing("pool", thing.name, fields)


async def _write_pool(client: PrefectClient, difference: Difference) -> None:
    name, fields = difference.thing.name, difference.thing.fields
    if difference.old is None:
        await client.create_work_pool(WorkPoolCreate(name=name, **fields))
        return
    update = WorkPoolUpdate(description=fields["description"], base_job_template=fields["base_job_template"])
    await client.update_work_pool(name, update)


async def _queue(client: PrefectClient, thing: Thing) -> WorkQueue | None:
    pool, name = thing.name.split("/")
    try:
        return next((q for q in await client.read_work_queues(pool) if q.name == name), None)
    except ObjectNotFound:
        return None


async def _read_queue(client: PrefectClient, thing: Thing) -> Thing | None:
    queue = await _queue(client, thing)
    if queue is None:
        return None
    return Thing("queue", thing.name, {"priority": queue.priority, "description": queue.description})


async def _write_queue(client: PrefectClient, difference: Difference) -> None:
    # Looked for anew: a pool that was made a moment ago moves priorities about.
    queue = await _queue(client, difference.thing)
    pool, name = difference.thing.name.split("/")
    if queue is None:
        await client.create_work_queue(name, work_pool_name=pool, **difference.thing.fields)
    else:
        await client.update_work_queue(queue.id, **difference.thing.fields)


async def _read_deployment(client: PrefectClient, thing: Thing) -> Thing | None:
    try:
        found = await client.read_deployment_by_name(thing.name)
    except ObjectNotFound:
        return None
    schedules = {
        schedule.slug or f"#{number}": {
            **schedule.schedule.model_dump(mode="json"),
            "parameters": schedule.parameters,
        }
        for number, schedule in enumerate(found.schedules)
    }
    fields = {name: getattr(found, name) for name in thing.fields if name != "schedules"}
    fields |= {"schedules": schedules, "tags": sorted(found.tags), "pull_steps": found.pull_steps or []}
    active = {schedule.slug: schedule.active for schedule in found.schedules}
    return Thing("deployment", thing.name, fields, {"active": active})


async def _write_deployment(client: PrefectClient, difference: Difference) -> None:
    """Prefect replaces a deployment of the same name with its schedules; those known keep their switch."""
    fields = dict(difference.thing.fields)
    active = {**difference.thing.switches["active"], **(difference.old.switches["active"] if difference.old else {})}
    schedules = []
    for slug, values in fields.pop("schedules").items():
        cron = CronSchedule(**{k: v for k, v in values.items() if k != "parameters"})
        schedules.append(
            DeploymentScheduleCreate(schedule=cron, slug=slug, active=active[slug], parameters=values["parameters"])
        )
    flow, name = difference.thing.name.split("/")
    flow_id = await client.create_flow_from_name(flow)
    await client.create_deployment(flow_id=flow_id, name=name, schedules=schedules, **fields)


async def _read_automation(client: PrefectClient, thing: Thing) -> Thing | None:
    found = await client.read_automations_by_name(thing.name)
    return Thing("automation", thing.name, automation_fields(found[0])) if found else None


async def _write_automation(client: PrefectClient, difference: Difference) -> None:
    name, fields = difference.thing.name, difference.thing.fields
    if difference.old is None:
        await client.create_automation(AutomationCore(name=name, **fields, **difference.thing.switches))
        return
    (found, *_) = await client.read_automations_by_name(name)
    await client.update_automation(found.id, AutomationCore(name=name, **fields, enabled=found.enabled))


_READ: dict[str, Callable[[PrefectClient, Thing], Awaitable[Thing | None]]] = {
    "pool": _read_pool,
    "queue": _read_queue,
    "deployment": _read_deployment,
    "automation": _read_automation,
}
_WRITE: dict[str, Callable[[PrefectClient, Difference], Awaitable[None]]] = {
    "pool": _write_pool,
    "queue": _write_queue,
    "deployment": _write_deployment,
    "automation": _write_automation,
}
