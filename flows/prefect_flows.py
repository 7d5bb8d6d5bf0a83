"""The Prefect flows of recipes, one for each graph of flows/stage_graphs.py.

All flows have the same parameters, which are the fields of their form in Prefect's UI.
"""

# Annotations are evaluated here, not kept as strings: Prefect may load this file by its path, as a module of another
# name, and then could not look the names up.

import contextlib
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from prefect import Flow, flow

from flows.recipe.forms import (
    Approve,
    Dispatched,
    Force,
    Only,
    Overrides,
    RecipeFile,
    RecipeInputs,
    RecipeName,
    RecipeSeed,
    Start,
    with_form,
)
from flows.recipe.load import load_recipe, shipped
from flows.recipe.pipeline_names import PipelineName
from flows.recipe.schema import Recipe
from flows.run.executor import run_label, run_pipeline
from flows.run.plan import StageSelection
from flows.stage_contract.stage import Step
from flows.stage_contract.stage_flow import parameters_of_run
from flows.stage_graphs import (
    dev1_graph,
    distill_graph,
    process_supervision_graph,
    r1_graph,
    r1_zero_graph,
    rlhf_ppo_graph,
)
from grpo.errors import InputError

LISTED_ROUNDS = 4
"""Rounds of alignment whose stages are listed in forms."""
STUDENT_STAGES = r"^(base|student)_[A-Za-z0-9][\w.-]*$"
"""Stages of students, which have the names that a recipe gives them: forms cannot list them all."""
_F = TypeVar("_F", bound=Callable[..., dict[str, Any]])


def name_of_run() -> str:
    """Name of a recipe's flow run: recipe, seed and overrides."""
    parameters = parameters_of_run()
    recipe, overrides = parameters.get("recipe_file") or parameters["recipe"], parameters.get("overrides") or []
    try:
        return run_label(load_recipe(recipe, overrides, parameters.get("seed")), overrides)
    except InputError:  # the run itself will fail with it
        return f"{recipe}: refused"


@functools.cache  # a form asks for it many times
def stage_names(graph: Callable[[Recipe], Sequence[Step]]) -> tuple[str, ...]:
    """The stages of a graph over all shipped recipes, with up to LISTED_ROUNDS rounds of alignment."""
    names: dict[str, None] = {}
    for name in shipped():
        for overrides in ([], [f"alignment.rounds={LISTED_ROUNDS}"]):
            with contextlib.suppress(InputError):  # the recipe lacks a section that this graph or a second round needs
                names |= dict.fromkeys(step.name for step in graph(load_recipe(name, overrides)))
    return tuple(names)


def _recipe_flow(name: str, graph: Callable[[Recipe], Sequence[Step]]) -> Callable[[_F], Flow[..., dict[str, Any]]]:
    """Decorator that makes a recipe's flow. Its form lists the stages of the graph."""
    choices = dict.fromkeys(("start", "only", "force"), partial(stage_names, graph))
    others = STUDENT_STAGES if graph is distill_graph else None
    named = flow(name=name, flow_run_name=name_of_run)
    return lambda function: with_form(named, function, choices, others)


@_recipe_flow("train-r1", r1_graph)
def train_r1(
    recipe: RecipeName = "tiny",
    overrides: Overrides = None,
    seed: RecipeSeed = None,
    start: Start = None,
    only: Only = None,
    force: Force = None,
    inputs: RecipeInputs = None,
    approve: Approve = None,
    recipe_file: RecipeFile = None,
    dispatch: Dispatched = False,
) -> dict[str, Any]:
    """The full DeepSeek-R1 recipe."""
    selection = StageSelection(start, only, force or (), inputs or {}, approve or ())
    return run_pipeline("r1", recipe_file or recipe, overrides or [], seed, selection, dispatch)


@_recipe_flow("train-r1-zero", r1_zero_graph)
def train_r1_zero(
    recipe: RecipeName = "tiny",
    overrides: Overrides = None,
    seed: RecipeSeed = None,
    start: Start = None,
    only: Only = None,
    force: Force = None,
    inputs: RecipeInputs = None,
    approve: Approve = None,
    recipe_file: RecipeFile = None,
    dispatch: Dispatched = False,
) -> dict[str, Any]:
    """R1-Zero: reinforcement learning from the base model, without supervised fine-tuning."""
    selection = StageSelection(start, only, force or (), inputs or {}, approve or ())
    return run_pipeline("r1_zero", recipe_file or recipe, overrides or [], seed, selection, dispatch)


@_recipe_flow("train-distill", distill_graph)
def distill(
    recipe: RecipeName = "tiny",
    overrides: Overrides = None,
    seed: RecipeSeed = None,
    start: Start = None,
    only: Only = None,
    force: Force = None,
    inputs: RecipeInputs = None,
    approve: Approve = None,
    recipe_file: RecipeFile = None,
    dispatch: Dispatched = False,
) -> dict[str, Any]:
    """Distillation: supervised fine-tuning of the recipe's students on what Dev2 wrote."""
    selection = StageSelection(start, only, force or (), inputs or {}, approve or ())
    return run_pipeline("distill", recipe_file or recipe, overrides or [], seed, selection, dispatch)


@_recipe_flow("train-rlhf-ppo", rlhf_ppo_graph)
def rlhf_ppo(
    recipe: RecipeName = "tiny",
    overrides: Overrides = None,
    seed: RecipeSeed = None,
    start: Start = None,
    only: Only = None,
    force: Force = None,
    inputs: RecipeInputs = None,
    approve: Approve = None,
    recipe_file: RecipeFile = None,
    dispatch: Dispatched = False,
) -> dict[str, Any]:
    """InstructGPT's three steps: supervised fine-tuning, reward models, PPO against them."""
    selection = StageSelection(start, only, force or (), inputs or {}, approve or ())
    return run_pipeline("rlhf_ppo", recipe_file or recipe, overrides or [], seed, selection, dispatch)


@_recipe_flow("train-dev1", dev1_graph)
def train_dev1(
    recipe: RecipeName = "tiny",
    overrides: Overrides = None,
    seed: RecipeSeed = None,
    start: Start = None,
    only: Only = None,
    force: Force = None,
    inputs: RecipeInputs = None,
    approve: Approve = None,
    recipe_file: RecipeFile = None,
    dispatch: Dispatched = False,
) -> dict[str, Any]:
    """Stage 1 of R1 as published: R1-Zero's trajectories, filtered and rewritten, make Dev1."""
    selection = StageSelection(start, only, force or (), inputs or {}, approve or ())
    return run_pipeline("dev1", recipe_file or recipe, overrides or [], seed, selection, dispatch)


@_recipe_flow("train-process-supervision", process_supervision_graph)
def process_supervision(
    recipe: RecipeName = "tiny",
    overrides: Overrides = None,
    seed: RecipeSeed = None,
    start: Start = None,
    only: Only = None,
    force: Force = None,
    inputs: RecipeInputs = None,
    approve: Approve = None,
    recipe_file: RecipeFile = None,
    dispatch: Dispatched = False,
) -> dict[str, Any]:
    """GRPO with process supervision: a process reward model of Dev1's reasoning, and RL on its scores of steps."""
    selection = StageSelection(start, only, force or (), inputs or {}, approve or ())
    return run_pipeline("process_supervision", recipe_file or recipe, overrides or [], seed, selection, dispatch)


RECIPE_FLOWS: dict[PipelineName, Flow[..., dict[str, Any]]] = {
    "r1": train_r1,
    "r1_zero": train_r1_zero,
    "distill": distill,
    "rlhf_ppo": rlhf_ppo,
    "dev1": train_dev1,
    "process_supervision": process_supervision,
}
"""Name in `--flow` -> flow."""
