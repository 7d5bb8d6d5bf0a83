"""Runs a recipe: the steps of its graph in order, its gates, and its record in MLflow.

The Prefect flows in flows/prefect_flows.py call this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flows.home import store, tracking
from flows.progress import Progress, checkpoint_line
from flows.recipe.load import load_recipe
from flows.recipe.pipeline_names import FLOW_NAMES, PipelineName
from flows.recipe.schema import Recipe
from flows.run import report
from flows.run.estimate import FILE as ESTIMATE
from flows.run.estimate import for_record
from flows.run.gates.checks import check_gates
from flows.run.gates.gatekeeper import GATE_STEP, Gatekeeper, RunStep
from flows.run.graph_edges import link_result
from flows.run.here import run_here
from flows.run.model_aliases import move_aliases
from flows.run.plan import StageSelection, reference_to, resolve_inputs
from flows.stage_contract.flow_run import flow_run_id
from flows.stage_contract.references import resolve
from flows.stage_contract.run_page import RunPage
from flows.stage_contract.stage import RunContext, Step
from flows.stage_graphs import GRAPHS
from flows.stages import evaluate
from grpo.errors import InputError
from tasks.report.tables import closing_rows
from tasks.store.manifest import Manifest
from tasks.tracking.client import RECIPE_FILE, Tracking
from tasks.tracking.names import join_name
from tasks.tracking.results import of_checkpoint
from tasks.tracking.tags import (
    ERROR_TAG,
    FAILED_TAG,
    FLOW_RUN_TAG,
    FLOW_TAG,
    NOTE_TAG,
    OVERRIDES_TAG,
    SEED_TAG,
    WAITING_TAG,
)
from tasks.trainer.fork_client import fork_server


class RecipeFailed(Exception):
    """A stage, or the gate after it, failed. Holds the result so far; the error is the cause."""

    def __init__(self, result: dict[str, Any], stage: str, cause: BaseException):
        super().__init__(f"{stage}: {cause}")
        self.result, self.stage, self.cause = result, stage, cause


def run_pipeline(
    name: PipelineName,
    recipe_name: str,
    overrides: Sequence[str],
    seed: int | None,
    selection: StageSelection,
    dispatched: bool,
) -> dict[str, Any]:
    """Runs a recipe through one of the pipelines that `--flow` names. Returns what `r1 run --json` prints."""
    return run_recipe(FLOW_NAMES[name], GRAPHS[name], recipe_name, overrides, seed, selection, dispatched)


def run_recipe(
    flow_name: str,
    graph_of: Callable[[Recipe], Sequence[Step]],
    recipe_name: str,
    overrides: Sequence[str],
    seed: int | None,
    selection: StageSelection,
    dispatched: bool,
) -> dict[str, Any]:
    """Loads a recipe and runs its selected stages in order, here or on their work pools.

    Returns:
        What `r1 run --json` prints.
    """
    with fork_server():
        recipe = load_recipe(recipe_name, overrides, seed)
        return _run(flow_name, graph_of(recipe), recipe, overrides, selection, dispatched)


def _run(
    flow_name: str,
    graph: Sequence[Step],
    recipe: Recipe,
    overrides: Sequence[str],
    selection: StageSelection,
    dispatched: bool,
) -> dict[str, Any]:
    active_gates = check_gates(recipe.gates, graph, selection.approve)
    selection.check(graph, active_gates)
    # Once, so that all stages read the same, whatever another run makes meanwhile.
    given = {stage: resolve(reference, stage).exact for stage, reference in selection.inputs.items()}
    selection = replace(selection, inputs=given)
    steps = [step for step in graph if selection.runs(graph, step.name)]
    run_step: RunStep = run_here
    if dispatched:
        from flows.run.deployed import check_deployments
        from flows.run.dispatch import dispatch as run_step

        check_deployments([*steps, *([GATE_STEP] if any(gate.evaluate for gate in active_gates) else [])])
    record = tracking()
    record.reconcile()
    run_id = _begin(record, recipe, flow_name, overrides)
    label = run_label(recipe, overrides)
    page = RunPage(recipe.name)
    page.link(record, run_id)
    if (estimated := for_record(graph, recipe)) is not None:
        record.log_text(run_id, estimated, ESTIMATE)
    result: dict[str, Any] = {"recipe": recipe.name, "run_id": run_id, "stages": [], "gates": [], "checkpoints": {}}
    produced: dict[str, str] = {}  # stage -> digest

    def manifest_of(stage: str) -> Manifest:
        manifest = resolve(reference_to(stage, graph, recipe, selection, produced)).manifest
        if manifest is None:
            raise InputError(f"a gate looks at {stage}, which is a path here; give an artifact of the store")
        return manifest

    gates = Gatekeeper(
        active_gates, recipe, record, run_id, selection.approve, manifest_of, result["gates"].append, run_step, label
    )
    for number, step in enumerate(steps):
        page.stage(number, len(steps), step.name)
        Progress.current().tell(f"stage {number + 1} of {len(steps)}: {step.name}")
        try:
            force = step.name in selection.force
            where = RunContext(recipe=recipe.name, parent_run_id=run_id, force=force, label=label)
            inputs = resolve_inputs(step, graph, recipe, selection, produced)
            summary = run_step(step, step.config(recipe), inputs, recipe.seed, where)
        except BaseException as error:
            failed: dict[str, Any] = {"name": step.name, "status": "failed", "key": None, "seconds": 0.0, "metrics": {}}
            result["stages"].append(failed)
            Progress.current().failed(step.name, str(error))
            _fail(record, run_id, result, step.name, error)
            raise
        produced[step.name] = link_result(summary)
        result["stages"].append({k: summary[k] for k in ("name", "status", "key", "seconds", "metrics")})
        try:
            gates.after(step.name)
        except BaseException as error:
            _fail(record, run_id, result, step.name, error)
            raise
    move_aliases(record, recipe.name, produced, [step.name for step in graph], result["gates"])
    _close(record, run_id, recipe, result, produced)
    page.stage(len(steps), len(steps), "the report is made")
    return result


def run_label(recipe: Recipe, overrides: Sequence[str]) -> str:
    """What distinguishes the runs of a recipe: `tiny seed 0 · reasoning_rl.kl_coef=0.002`."""
    return join_name(f"{recipe.name} seed {recipe.seed}", overrides)


def _begin(record: Tracking, recipe: Recipe, flow_name: str, overrides: Sequence[str]) -> str:
    """The recipe's MLflow run: the one that this flow run began before it crashed or was suspended, or a new one."""
    config = recipe.model_dump(mode="json")
    flow_run = {FLOW_RUN_TAG: own} if (own := flow_run_id()) else {}
    previous = record.reader.newest(recipe.name, flow_run) if flow_run else None
    if previous is not None and record.reader.read_json(previous.id, RECIPE_FILE) == config:
        record.reopen(previous.id)
        for tag in {FAILED_TAG, ERROR_TAG, WAITING_TAG} & previous.tags.keys():
            record.delete_tag(previous.id, tag)
        return previous.id
    tags = {
        **flow_run,
        FLOW_TAG: flow_name,
        SEED_TAG: str(recipe.seed),
        OVERRIDES_TAG: " ".join(overrides),
        NOTE_TAG: recipe.description,
    }
    return record.recipe_run(recipe.name, run_label(recipe, overrides), config, tags)


def _close(
    record: Tracking, run_id: str, recipe: Recipe, result: dict[str, Any], references: Mapping[str, str]
) -> None:
    """Logs the closing table to the parent run in MLflow, finishes that run, and makes the report."""
    if "evaluate" in references:
        result["checkpoints"] = evaluate.read_table(store().resolve(references["evaluate"]))
        values = {
            of_checkpoint(metric, name): value
            for name, row in result["checkpoints"].items()
            for metric, value in row.items()
            if isinstance(value, float)
        }
        record.log_metrics(run_id, [{"step": 0, **values}])
        record.log_table(run_id, "checkpoints", closing_rows(result["checkpoints"]))
        for name, row in result["checkpoints"].items():
            Progress.current().tell(checkpoint_line(name, row))
    record.finish(run_id, "FINISHED")
    record.reconcile_now()  # another run of the same command may have been killed meanwhile
    _report(record, run_id, result)


def _fail(record: Tracking, run_id: str, result: dict[str, Any], stage: str, error: BaseException) -> None:
    """Records the failure. A failed run gets a report; one that is being stopped has no time for it, and one that is
    suspended until somebody answers a gate has not failed."""
    from prefect.exceptions import Pause

    if isinstance(error, Pause):
        record.finish(run_id, "KILLED")
        return
    record.fail(run_id, error, {FAILED_TAG: stage})
    if isinstance(error, Exception):
        _report(record, run_id, result)
        raise RecipeFailed(result, stage, error) from error


def _report(record: Tracking, run_id: str, result: dict[str, Any]) -> None:
    page = report.publish(record, run_id)
    result["report"] = str(page) if page else None
