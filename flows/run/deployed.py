"""The deployments of stages on a Prefect server, to which a recipe dispatches its steps."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from pydantic import BaseModel, ValidationError

from flows.stage_contract.references import Input
from flows.stage_contract.stage import Step
from grpo.errors import InputError


def deployment_of(step: Step) -> str:
    """Prefect's name of a step's deployment, FLOW/DEPLOYMENT. Both parts are the name of the stage's flow."""
    return f"{step.flow_name}/{step.flow_name}"


def check_deployments(graph: Iterable[Step]) -> None:
    """Checks before a run that every step has a deployment on the server.

    Raises:
        InputError: a step has none.
    """
    with get_client(sync_client=True) as client:
        for name in dict.fromkeys(deployment_of(step) for step in graph):
            try:
                client.read_deployment_by_name(name)
            except ObjectNotFound:
                raise InputError(f"no deployment {name} at {client.api_url}; `r1 deploy` registers it") from None


def with_absolute_paths(step: Step, config: BaseModel, resolved: Mapping[str, Input]) -> dict[str, Any]:
    """The fields of a configuration that were set, with absolute paths, because a worker has another working directory.
    It fills in the same defaults for the other fields.

    A path's text may also be that of another field, such as the name of a test set. So a field counts as a path only if
    the stage reads other files once it is changed.
    """
    absolute = {str(path): str(resolved[name].path) for name, path in step.stage.files(config).items()}

    def files(values: dict[str, Any]) -> list[str] | None:
        try:
            return sorted(map(str, step.stage.files(type(config).model_validate(values)).values()))
        except ValidationError:  # a path where the field allows none
            return None

    values = config.model_dump(mode="json", exclude_unset=True)
    for place, text in list(_texts(values)):
        if absolute.get(text, text) != text:
            changed = _replaced(values, place, absolute[text])
            values = values if files(changed) in (None, files(values)) else changed
    return values


def _texts(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """The texts in nested values, each after its place: names of fields, and indices of lists."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in parts:
        yield from _texts(inner, (*place, name))
    if isinstance(value, str):
        yield place, value


def _replaced(values: dict[str, Any], place: tuple[Any, ...], text: str) -> dict[str, Any]:
    changed: Any = copy.deepcopy(values)
    inner = changed
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = text
    return cast(dict[str, Any], changed)
