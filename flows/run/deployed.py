"""The deployments of stages on a Prefect server, to which a recipe dispatches its steps."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound

from flows.stage_contract.stage import Step
from grpo.errors import InputError


def deployment_of(step: Step) -> str:
    """Prefect's name of a step's deployment, FLOW/DEPLOYMENT. Both parts are the name of the stage's flow."""
    flow: Any = step.flow.func if isinstance(step.flow, partial) else step.flow
    return f"{flow.name}/{flow.name}"


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
