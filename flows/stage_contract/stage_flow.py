"""The Prefect flow of a stage, and the names of its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from prefect import Flow, Task, flow
from prefect.context import FlowRunContext
from prefect.states import State

from flows.recipe.forms import with_form
from flows.stage_contract.stage import RunContext

_F = TypeVar("_F", bound=Callable[..., Any])
_R = TypeVar("_R")


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


def without_flow(flow: Callable[..., Any]) -> Callable[..., State]:
    """The function of a stage's flow, for calls without Prefect. Some flows have some of their arguments already
    set."""
    if isinstance(flow, partial):
        return partial(without_flow(flow.func), *flow.args, **flow.keywords)
    function: Callable[..., State] = flow.fn  # type: ignore[attr-defined]
    return function


def run_in_batches(tasks: Sequence[Task[[int], _R]], size: int) -> list[_R]:
    """Results of tasks that take their number. At most `size` are submitted at a time, because Prefect starts a thread
    for each waiting task, and a set of a million samples has thousands of shards."""
    results: list[_R] = []
    for start in range(0, len(tasks), size):
        futures = [task.submit(start + i) for i, task in enumerate(tasks[start : start + size])]
        results += [future.result() for future in futures]
    return results
