"""The deployments of stages on a Prefect server, to which a recipe dispatches its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from pydantic import BaseModel

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


def with_absolute_paths(value: Any, step: Step, config: BaseModel, resolved: Mapping[str, Input]) -> Any:
    """The configuration with absolute paths, because a worker has another working directory."""
    paths = {str(path): str(resolved[name].path) for name, path in step.stage.files(config).items()}

    def absolute(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: absolute(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [absolute(inner) for inner in value]
        return paths.get(value, value) if isinstance(value, str) else value

    return absolute(value)
