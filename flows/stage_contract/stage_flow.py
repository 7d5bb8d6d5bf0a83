"""The Prefect flow of a stage, and the names of its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from prefect import Flow, flow
from prefect.context import FlowRunContext
from prefect.states import Completed, State

from flows.recipe.forms import with_form
from flows.stage_contract.flow_run import FLOW_RUN, flow_run_id
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


def completed(summary: Mapping[str, Any]) -> State:
    """The final state of a stage's flow run, which says whether the stage ran or was reused. Its data is the summary
    with the id of the flow run."""
    return Completed(
        name="Reused" if summary["status"] == "reused" else "Completed", data={**summary, FLOW_RUN: flow_run_id()}
    )
