"""The Prefect flow of a stage, and the names of its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from prefect import Flow, flow
from prefect.context import FlowRunContext

from flows.recipe.forms import with_form
from flows.stage_contract.stage import RunContext

_F = TypeVar("_F", bound=Callable[..., Any])


def parameters_of_run() -> Mapping[str, Any]:
    """Parameters of the current flow run, for a function that names the run."""
    context = FlowRunContext.get()
    assert context is not None and context.parameters is not None, "Prefect asks for the name inside of the run"
    return context.parameters


def stage_flow(
    stage: str,
    stage_of: Callable[[Mapping[str, Any]], str] | None = None,
    choices: Mapping[str, Callable[[], Sequence[str]]] | None = None,
    others: str | None = None,
) -> Callable[[_F], Flow[..., Any]]:
    """Decorator that makes the flow of one stage, or of several; then `stage_of` returns the stage from a run's
    parameters. `choices` and `others`: see `with_form`."""

    def name_of_run() -> str:
        parameters = parameters_of_run()
        where = parameters.get("where") or RunContext()
        return where.name_run(stage_of(parameters) if stage_of else stage, parameters.get("seed", 0))

    named = flow(name=stage, flow_run_name=name_of_run)
    return lambda function: with_form(named, function, choices, others)
