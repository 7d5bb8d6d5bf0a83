"""The recipe as flows: the paper's method section, stage by stage.

train_r1:       problems, base -> cold start -> Dev1 -> reasoning RL -> Dev2 -> rejection sampling
                -> SFT from base -> Dev3 -> reward models -> alignment RL -> R1 -> evaluation -> report;
                the two before evaluation again for each further round of alignment
train_r1_zero:  problems, base -> RL -> Zero -> evaluation -> report
distill:        as train_r1 up to the SFT data -> SFT of each student -> evaluation beside Dev2 -> report
rlhf_ppo:       problems, base -> cold start -> Dev1 -> reward models -> PPO -> evaluation -> report (InstructGPT)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from prefect import flow
from prefect.context import FlowRunContext

from flows.cli.promote import move_aliases
from flows.home import store, tracking
from flows.pipelines import GRAPHS, Step
from flows.progress import Progress
from flows.recipe.forms import Approve, Dispatched, Force, Only, Overrides, RecipeInputs, RecipeName, RecipeSeed, Start
from flows.recipe.load import load_recipe
from flows.recipe.schema import Recipe
from flows.run import report
from flows.run.dispatch import check_deployments, dispatch, run_here
from flows.run.estimate import FILE as ESTIMATE
from flows.run.estimate import for_record
from flows.run.gates import GATE_STEP, Gatekeeper, RunStep, check_gates
from flows.stages import evaluate
from flows.stages.contract import Where, find_key
from flows.stages.references import resolve
from flows.stages.run_page import RunPage
from grpo.errors import InputError
from tasks.report.tables import closing_rows
from tasks.store.store import Manifest
from tasks.tracking.client import RECIPE_FILE, Tracking
from tasks.tracking.reader import ERROR_TAG, FAILED_TAG, FLOW_RUN_TAG, FLOW_TAG, NOTE_TAG
from tasks.tracking.run_names import name_run
from tasks.trainer.fork_client import warm_trainers


@dataclass
class Choice:
    """Which stages of a recipe run, and which gates that ask are approved beforehand."""

    start: str | None = None
    only: str | None = None
    force: Sequence[str] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    approve: Sequence[str] = ()

    def check(self, graph: Sequence[Step]) -> None:
        known = [step.name for step in graph]
        for name in [*self.force, *filter(None, (self.start, self.only)), *self.inputs]:
            if name not in known:
                raise InputError(f"unknown stage {name!r}; the stages are {', '.join(known)}")
        if self.start and self.only:
            raise InputError("give --from or --only, not both")

    def runs(self, graph: Sequence[Step], name: str) -> bool:
        names = [step.name for step in graph]
        if self.only:
            return name == self.only
        return self.start is None or names.index(name) >= names.index(self.start)


class RecipeFailed(Exception):
    """A stage failed, or the gate behind it: what was done before, and the error itself as the cause."""

    def __init__(self, result: dict[str, Any], stage: str, cause: BaseException):
        super().__init__(f"{stage}: {cause}")
        self.result, self.stage, self.cause = result, stage, cause


def _recipe_flow(graph: str, function: str, title: str) -> Any:
    """A flow for one graph. All have the same form in Prefect's UI, whose fields are the parameters here."""

    def run(
        recipe: RecipeName = "tiny",
        overrides: Overrides = None,
        seed: RecipeSeed = None,
        start: Start = None,
        only: Only = None,
        force: Force = None,
        inputs: RecipeInputs = None,
        approve: Approve = None,
        dispatch: Dispatched = False,
    ) -> dict[str, Any]:
        choice = Choice(start, only, force or (), inputs or {}, approve or ())
        with warm_trainers():
            return run_recipe(graph, load_recipe(recipe, overrides or (), seed), choice, overrides or [], dispatch)

    run.__name__ = run.__qualname__ = function  # Prefect finds a flow again by its function's name in the module
    # Types, not their names: where Prefect loads this file by its path, nobody could look the names up.
    run.__annotations__ = get_type_hints(run, include_extras=True)
    run.__doc__ = title
    name = function.replace("_", "-")
    return flow(name=name, flow_run_name=f"{name}-{{recipe}}")(run)


train_r1 = _recipe_flow("r1", "train_r1", "The full DeepSeek-R1 recipe.")
train_r1_zero = _recipe_flow(
    "r1_zero", "train_r1_zero", "R1-Zero: reinforcement learning from the base model, without supervised fine-tuning."
)
distill = _recipe_flow(
    "distill", "distill", "Distillation: supervised fine-tuning of the recipe's students on what Dev2 wrote."
)
rlhf_ppo = _recipe_flow(
    "rlhf_ppo", "rlhf_ppo", "InstructGPT's three steps: supervised fine-tuning, reward models, PPO against them."
)
FLOWS = {"r1": train_r1, "r1_zero": train_r1_zero, "distill": distill, "rlhf_ppo": rlhf_ppo}


def run_recipe(
    graph_name: str, recipe: Recipe, choice: Choice, overrides: Sequence[str], dispatched: bool = False
) -> dict[str, Any]:
    """Run the chosen stages in order, here or on their work pools; the result is what `r1 run --json` prints."""
    graph = GRAPHS[graph_name](recipe)
    choice.check(graph)
    chosen = check_gates(recipe.gates, [step.name for step in graph], choice.approve)
    run_stage_of = RUNNERS[dispatched]
    if dispatched:
        evaluated = [GATE_STEP] if any(gate.evaluate for gate in chosen) else []
        check_deployments([*(step for step in graph if choice.runs(graph, step.name)), *evaluated])
    record = tracking()
    record.reconcile()
    run_id = _begin(record, recipe, FLOWS[graph_name].fn.__name__, overrides)
    page = RunPage(recipe.name)
    page.link(record, run_id)
    if (estimated := for_record(graph, recipe)) is not None:
        record.log_text(run_id, estimated, ESTIMATE)
    result: dict[str, Any] = {"recipe": recipe.name, "run_id": run_id, "stages": [], "gates": [], "checkpoints": {}}
    references: dict[str, str] = {}

    def made(stage: str) -> Manifest:
        found = resolve(_reference(stage, graph, recipe, choice, references)).manifest
        if found is None:
            raise InputError(f"a gate looks at {stage}, which is a path here; give an artifact of the store")
        return found

    gates = Gatekeeper(chosen, recipe, record, run_id, choice.approve, made, result["gates"].append, run_stage_of)
    steps = [step for step in graph if choice.runs(graph, step.name)]
    for number, step in enumerate(steps):
        page.stage(number, len(steps), step.name)
        try:
            where = Where(recipe=recipe.name, parent_run_id=run_id, force=step.name in choice.force)
            inputs = {n: _reference(maker, graph, recipe, choice, references) for n, maker in step.inputs.items()}
            done = run_stage_of(step, step.config(recipe), inputs, recipe.seed, where)
        except BaseException as error:
            failed: dict[str, Any] = {"name": step.name, "status": "failed", "key": None, "seconds": 0.0, "metrics": {}}
            result["stages"].append(failed)
            Progress.current().failed(step.name, str(error))
            _fail(record, run_id, result, step.name, error)
            raise
        references[step.name] = done["key"]
        result["stages"].append({k: done[k] for k in ("name", "status", "key", "seconds", "metrics")})
        try:
            gates.after(step.name)
        except BaseException as error:
            _fail(record, run_id, result, step.name, error)
            raise
    move_aliases(record, recipe.name, references, [step.name for step in graph], result["gates"])
    _close(record, run_id, recipe, result, references)
    page.stage(len(steps), len(steps), "the report is made")
    return result


def _begin(record: Tracking, recipe: Recipe, flow_name: str, overrides: Sequence[str]) -> str:
    """The recipe's run in MLflow: the one that this flow run began before it crashed or was suspended, or a new one."""
    config = recipe.model_dump(mode="json")
    context = FlowRunContext.get()
    flow_run = {FLOW_RUN_TAG: str(context.flow_run.id)} if context and context.flow_run else {}
    begun = record.tracked.newest(recipe.name, flow_run) if flow_run else None
    if begun is not None and record.tracked.read_json(begun.id, RECIPE_FILE) == config:
        record.reopen(begun.id)
        for tag in {FAILED_TAG, ERROR_TAG} & begun.tags.keys():
            record.delete_tag(begun.id, tag)
        return begun.id
    identity = {FLOW_TAG: flow_name}
    called = name_run(
        record.tracked, recipe.name, flow_name, identity, config, RECIPE_FILE, recipe.seed, first=overrides
    )
    said = {"r1flow.overrides": " ".join(overrides), NOTE_TAG: recipe.description}
    tags = {**identity, **flow_run, **called.tags, **said}
    return record.recipe_run(recipe.name, called.name, config, tags)


RUNNERS: dict[bool, RunStep] = {False: run_here, True: dispatch}


def _reference(stage: str, graph: Sequence[Step], recipe: Recipe, choice: Choice, references: Mapping[str, str]) -> str:
    """Where an earlier stage's artifact is taken from: the input given, this run's own, or what exists."""
    earlier = next(step for step in graph if step.name == stage)
    given = choice.inputs.get(stage)
    if given == "latest":  # of the step's own stage, also where its reader calls the input by another name
        given = f"latest:{stage}"
    return given or references.get(stage) or newest(earlier, graph, recipe)


def newest(step: Step, graph: Sequence[Step], recipe: Recipe) -> str:
    """The artifact that a stage left out of this run is taken from: the recipe's own, else the stage's newest."""
    manifest = existing(step, graph, recipe)
    return manifest.key if manifest else f"latest:{step.name}"


def existing(step: Step, graph: Sequence[Step], recipe: Recipe) -> Manifest | None:
    """What the store holds for a stage under exactly this recipe, all the way up."""
    references: dict[str, str] = {}
    for name, maker in step.inputs.items():
        manifest = existing(next(s for s in graph if s.name == maker), graph, recipe)
        if manifest is None:
            return None
        references[name] = manifest.key
    _, key = find_key(step.stage, step.config(recipe), references, recipe.seed)
    return store().find(key)


def _close(
    record: Tracking, run_id: str, recipe: Recipe, result: dict[str, Any], references: Mapping[str, str]
) -> None:
    """Put the closing table where people look: the parent run in MLflow, and the report."""
    if "evaluate" in references:
        result["checkpoints"] = evaluate.read_table(store().resolve(references["evaluate"]))
        values = {
            f"{name}/{metric}": value
            for name, row in result["checkpoints"].items()
            for metric, value in row.items()
            if isinstance(value, float)
        }
        record.log_metrics(run_id, [{"step": 0, **values}])
        record.log_table(run_id, "checkpoints", closing_rows(result["checkpoints"]))
    record.finish(run_id, "FINISHED")
    _report(record, run_id, result)


def _fail(record: Tracking, run_id: str, result: dict[str, Any], stage: str, error: BaseException) -> None:
    """A run that failed has a report, too; one that is being stopped has no time for it."""
    record.set_tags(run_id, {FAILED_TAG: stage, ERROR_TAG: str(error)[:500]})
    record.finish(run_id, "FAILED" if isinstance(error, Exception) else "KILLED")
    if isinstance(error, Exception):
        _report(record, run_id, result)
        raise RecipeFailed(result, stage, error) from error


def _report(record: Tracking, run_id: str, result: dict[str, Any]) -> None:
    page = report.publish(record, run_id)
    result["report"] = str(page) if page else None
