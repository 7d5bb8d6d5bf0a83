"""What was last registered with the Prefect server of `r1 up`, so that its next start keeps what people have changed.

`r1 up` registers everything at each start, because an upgrade of r1flow may have changed it. A field that the server no
longer has as it was registered was changed by somebody: it stays. So do schedules that were added in the UI. All other
fields get the values of this version. `r1 deploy` is the command that sets everything right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect.client.orchestration import PrefectClient
from prefect.exceptions import ObjectNotFound
from pydantic import BaseModel, ValidationError

from flows.installation.reconcile import ResourceDiff
from flows.installation.resources import Resource
from flows.recipe.shipped import shipped
from tasks.store.whole_file import write_whole

FILE = "prefect/registered.json"
"""In the home folder, beside the server's database."""
_POOL = "r1-cpu"
"""Its id tells the server's database from another one, such as that of `r1 up --postgres`."""
_FROM_CODE = {"entrypoint", "version", "parameter_openapi_schema", "pull_steps"}
"""Fields that must fit the code, whatever the server has."""
_SCHEDULE = "schedules."


class Registered(BaseModel):
    """The choices of the last `r1 deploy`, None where nobody made them, and the fields of each resource as they were
    registered."""

    server: str | None = None
    recipe: str | None = None
    gpus: int | None = None
    fields: dict[str, dict[str, Any]] = {}

    @property
    def is_of_a_file(self) -> bool:
        """Whether forms were filled from a user's file, which may have changed since, or be gone."""
        return self.recipe is not None and self.recipe not in shipped()


async def read_registered(client: PrefectClient, home: Path) -> Registered:
    """The record of this server; an empty one if the home has none, or another server's."""
    try:
        record = Registered.model_validate_json((home / FILE).read_bytes())
    except (OSError, ValidationError):
        return Registered()
    same = record.server is not None and record.server == await _server(client)
    return record if same else Registered()


async def write_registered(client: PrefectClient, home: Path, last: Registered, wanted: Iterable[Resource]) -> None:
    """Records what was registered, with the choices of `last`. Resources that are not in `wanted` keep their record."""
    fields = {**last.fields, **{_key(resource): _recorded(resource) for resource in wanted}}
    record = last.model_copy(update={"server": await _server(client), "fields": fields})
    write_whole(home / FILE, record.model_dump_json())


def keep_changes(diff: ResourceDiff, last: Registered) -> ResourceDiff:
    """The difference without what somebody has changed on the server since `last`."""
    if diff.old is None or diff.retired:
        return diff
    known = last.fields.get(_key(diff.resource), {})
    old, new = _parts(diff.old.fields), _parts(diff.resource.fields)
    kept = {name for name in {**new, **old} if _is_changed(name, old, new, known)}
    if last.is_of_a_file and "config" in new.get("parameters", {}):
        kept.add("parameters")
    merged = {name: (old if name in kept else new).get(name) for name in {**new, **old}}
    fields = {name: value for name, value in merged.items() if not name.startswith(_SCHEDULE)}
    if "schedules" in diff.resource.fields:
        fields["schedules"] = {
            name.removeprefix(_SCHEDULE): value
            for name, value in merged.items()
            if name.startswith(_SCHEDULE) and value is not None
        }
    return replace(diff, resource=replace(diff.resource, fields=fields))


def _is_changed(name: str, old: Mapping[str, Any], new: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Whether somebody changed this part since it was registered."""
    if name in _FROM_CODE:
        return False
    if name not in known:
        return name not in new  # a schedule of somebody's own
    if old.get(name) is None and not name.startswith(_SCHEDULE):
        return False  # such as the pool of a deployment, if somebody deleted the pool
    return bool(_without_defaults(old.get(name)) != known[name])


def _key(resource: Resource) -> str:
    return f"{resource.kind}/{resource.name}"


def _recorded(resource: Resource) -> dict[str, Any]:
    parts = _parts(resource.fields)
    return {name: _without_defaults(value) for name, value in parts.items() if name not in _FROM_CODE}


def _parts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a resource, with each schedule as a part of its own."""
    schedules = {_SCHEDULE + slug: values for slug, values in fields.get("schedules", {}).items()}
    return {**{name: value for name, value in fields.items() if name != "schedules"}, **schedules}


def _without_defaults(value: Any) -> Any:
    """A job template without the defaults of its variables, which belong to users; any other value as it is."""
    if not (isinstance(value, dict) and "job_configuration" in value):
        return value
    template = deepcopy(value)
    for variable in template.get("variables", {}).get("properties", {}).values():
        variable.pop("default", None)
    return template


async def _server(client: PrefectClient) -> str | None:
    try:
        return str((await client.read_work_pool(_POOL)).id)
    except ObjectNotFound:
        return None
