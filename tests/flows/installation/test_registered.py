"""What a start of `r1 up` changes on its server, and what people have changed there that stays."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import ObjectNotFound

from flows.installation.reconcile import ResourceDiff, compare
from flows.installation.registered import Registered, keep_changes, read_registered, write_registered
from flows.installation.resources import Resource, desired

WEEKLY = {"cron": "0 3 * * 6", "timezone": "UTC", "day_or": True, "parameters": {}}
HOURLY = {"interval": 3600.0, "anchor_date": "2026-01-01T00:00:00Z", "timezone": "UTC", "parameters": {"seed": 7}}
FIELDS = {
    "entrypoint": "flows.prefect_flows.train_r1",
    "version": "1",
    "description": "The recipe.",
    "work_pool_name": "r1-cpu",
    "parameters": {"config": {"epochs": 2}},
    "parameter_openapi_schema": {"type": "object"},
    "schedules": {"weekly": WEEKLY},
}


class Client:
    """A server with one pool, as far as the record asks it."""

    def __init__(self, id: str | None):
        self.id = id

    async def read_work_pool(self, name: str) -> Any:
        if self.id is None:
            raise ObjectNotFound(http_exc=Exception())
        return SimpleNamespace(id=self.id)


def resource(**fields: Any) -> Resource:
    return Resource("deployment", "train-r1/train-r1", {**FIELDS, **fields}, {"active": {"weekly": False}})


def record(home: Path, *wanted: Resource, **choices: Any) -> Registered:
    """The record of these resources, as the next start reads it."""
    client: Any = Client("one")
    asyncio.run(write_registered(client, home, Registered(**choices), wanted))
    return asyncio.run(read_registered(client, home))


def kept(on_server: Resource, new: Resource, last: Registered) -> dict[str, Any]:
    """The fields with which the next start goes on."""
    return keep_changes(ResourceDiff(new, on_server), last).resource.fields


def test_what_an_upgrade_changed_is_set_and_what_people_changed_stays(tmp_path: Path) -> None:
    last = record(tmp_path, resource())
    upgraded = resource(version="2", description="A better recipe.", parameters={"config": {"epochs": 3}})
    assert kept(resource(), upgraded, last) == upgraded.fields
    mine = resource(description="Mine.", parameters={"config": {"epochs": 9}})
    assert kept(mine, upgraded, last) == {**mine.fields, "version": "2"}
    # Forms that do not fit the code would refuse its runs.
    foreign = resource(parameter_openapi_schema={"type": "object", "title": "of Prefect's command"}, version="?")
    assert kept(foreign, resource(), last) == resource().fields


def test_schedules_of_people_stay_and_one_that_they_deleted_stays_away(tmp_path: Path) -> None:
    last = record(tmp_path, resource())
    monthly = {**WEEKLY, "cron": "0 3 1 * *"}
    upgraded = resource(schedules={"weekly": {**WEEKLY, "cron": "0 4 * * 6"}, "monthly": monthly})
    own = resource(schedules={"weekly": WEEKLY, "#1": HOURLY})
    assert kept(own, upgraded, last)["schedules"] == {**upgraded.fields["schedules"], "#1": HOURLY}
    changed = resource(schedules={"weekly": {**WEEKLY, "cron": "0 5 * * 6"}})
    assert kept(changed, resource(), last)["schedules"] == changed.fields["schedules"]
    assert kept(resource(schedules={}), upgraded, last)["schedules"] == {"monthly": monthly}
    assert kept(own, resource(schedules={}), last)["schedules"] == {"#1": HOURLY}  # one that r1flow gave up


class Renamed:
    """A server with deployments of these names and entrypoints, all tagged r1flow."""

    def __init__(self, *deployments: tuple[str, str]):
        made = [SimpleNamespace(name=name, entrypoint=entry, flow_id=1, schedules=[]) for name, entry in deployments]
        self.deployments = made

    async def read_deployment_by_name(self, name: str) -> Any:
        raise ObjectNotFound(http_exc=Exception())

    async def read_flows(self, **_: Any) -> Any:
        return [SimpleNamespace(id=1, name="train-r1")]

    async def read_deployments(self, **_: Any) -> Any:
        return self.deployments


def test_only_deployments_of_an_earlier_version_are_deleted() -> None:
    old = ("weekly", "flows.pipelines.train_r1")
    copied = ("nightly-evaluation", "flows.prefect_flows.train_r1")  # in the UI, of one that is registered now
    own = ("r1flow", "our_flows.train")
    server: Any = Renamed(old, copied, own)
    diffs = asyncio.run(compare(server, [resource()]))
    assert [(diff.status, diff.resource.name) for diff in diffs] == [
        ("create", "train-r1/train-r1"),
        ("delete", "train-r1/weekly"),
    ]


def test_what_is_missing_is_registered_again(tmp_path: Path) -> None:
    last = record(tmp_path, resource())
    without_pool = resource(work_pool_name=None)
    assert kept(without_pool, resource(), last)["work_pool_name"] == "r1-cpu"
    gone = ResourceDiff(resource(), None)
    assert keep_changes(gone, last) is gone


def test_a_limit_that_was_changed_by_hand_stays_and_another_follows_the_machine(tmp_path: Path) -> None:
    four, eight, three = (Resource("limit", "r1-gpus", {"limit": number}) for number in (4, 8, 3))
    last = record(tmp_path, four)
    assert kept(four, eight, last) == eight.fields
    assert kept(three, eight, last) == three.fields


def test_without_a_record_schedules_of_people_stay(tmp_path: Path) -> None:
    """As at the first start after a version that kept none."""
    old = resource(description="Before.", schedules={"weekly": WEEKLY, "mine": HOURLY})
    assert kept(old, resource(), Registered()) == {**FIELDS, "schedules": {"weekly": WEEKLY, "mine": HOURLY}}


def test_the_record_holds_for_its_own_server_alone(tmp_path: Path) -> None:
    assert record(tmp_path, resource(), recipe="real", gpus=3).recipe == "real"
    for other in (Client("another"), Client(None)):
        assert asyncio.run(read_registered(other, tmp_path)) == Registered()  # type: ignore[arg-type]
    (tmp_path / "prefect" / "registered.json").write_text('{"server": "one", "fields": []}')
    assert asyncio.run(read_registered(Client("one"), tmp_path)) == Registered()  # type: ignore[arg-type]


@pytest.mark.parametrize(("recipe", "epochs"), [("real", 3), ("/srv/mine.toml", 2)])
def test_forms_follow_the_recipe_last_deployed_but_no_file(tmp_path: Path, recipe: str, epochs: int) -> None:
    """A file may have changed since, or be gone: what it filled in stays."""
    last = record(tmp_path, resource(), recipe=recipe)
    fields = kept(resource(), resource(parameters={"config": {"epochs": 3}}), last)
    assert fields["parameters"] == {"config": {"epochs": epochs}}


def test_a_pools_variables_are_no_change_of_its_template(tmp_path: Path) -> None:
    """They belong to users; `compare` takes over their defaults."""
    pool = next(r for r in desired("process") if r.name == "r1-gpu")
    last = record(tmp_path, pool)
    template = pool.fields["base_job_template"]

    def with_fields(description: str, **variables: Any) -> Resource:
        properties = {**template["variables"]["properties"], **variables}
        changed = {**template, "variables": {**template["variables"], "properties": properties}}
        return replace(pool, fields={**pool.fields, "description": description, "base_job_template": changed})

    gpus = {"cuda_visible_devices": {**template["variables"]["properties"]["cuda_visible_devices"], "default": "0,1"}}
    on_server = with_fields(pool.fields["description"], **gpus)
    upgraded = with_fields("Other words.", **gpus, added={"type": "string"})
    assert kept(on_server, upgraded, last) == upgraded.fields
    mine = with_fields(pool.fields["description"], **gpus, mine={"type": "string"})
    assert kept(mine, upgraded, last)["base_job_template"] == mine.fields["base_job_template"]


def test_every_resource_has_a_record(tmp_path: Path) -> None:
    wanted = desired("process", gpus=2)
    last = record(tmp_path, *wanted)
    assert len(last.fields) == len(wanted)
    for one in wanted:
        assert kept(one, one, last) == one.fields
