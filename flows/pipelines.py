"""The pipelines: the graphs of flows/graphs.py, each with the Prefect flow that runs it.

The flows have the same parameters: the fields of their form in Prefect's UI.
"""

# Annotations are evaluated here, not kept as strings: Prefect may load this file by its path, as a module of another
# name, and then could not look the names up.

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prefect import Flow, flow

from flows.graphs import (
    dev1_graph,
    distill_graph,
    process_supervision_graph,
    r1_graph,
    r1_zero_graph,
    rlhf_ppo_graph,
)
from flows.recipe.forms import Approve, Dispatched, Force, Only, Overrides, RecipeInputs, RecipeName, RecipeSeed, Start
from flows.recipe.pipeline_names import PipelineName
from flows.recipe.schema import Recipe
from flows.run.executor import run_recipe
from flows.run.plan import StageSelection
from flows.stages.contract import Step


@flow(name="train-r1", flow_run_name="train-r1-{recipe}")
def train_r1(
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
    """The full DeepSeek-R1 recipe."""
    selection = StageSelection(start, only, force or (), inputs or {}, approve or ())
    return run_recipe("train_r1", r1_graph, recipe, overrides or [], seed, selection, dispatch)


@flow(name="train-r1-zero", flow_run_name="train-r1-zero-{recipe}")
def train_r1_zero(
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
    """R1-Zero: reinforcement learning from the base model, without supervised fine-tuning."""
    selection = StageSelection(start, only, force or (), inputs or {}, approve or ())
    return run_recipe("train_r1_zero", r1_zero_graph, recipe, overrides or [], seed, selection, dispatch)


@flow(name="distill", flow_run_name="distill-{recipe}")
def distill(
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
    """Distillation: supervised fine-tuning of the recipe's students on what Dev2 wrote."""
    selection = StageSelection(start, only, force or (), inputs or {}, approve or ())
    return run_recipe("distill", distill_graph, recipe, overrides or [], seed, selection, dispatch)


@flow(name="rlhf-ppo", flow_run_name="rlhf-ppo-{recipe}")
def rlhf_ppo(
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
    """InstructGPT's three steps: supervised fine-tuning, reward models, PPO against them."""
    selection = StageSelection(start, only, force or (), inputs or {}, approve or ())
    return run_recipe("rlhf_ppo", rlhf_ppo_graph, recipe, overrides or [], seed, selection, dispatch)


@flow(name="train-dev1", flow_run_name="train-dev1-{recipe}")
def train_dev1(
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
    """Stage 1 of R1 as published: R1-Zero's trajectories, filtered and rewritten, make Dev1."""
    selection = StageSelection(start, only, force or (), inputs or {}, approve or ())
    return run_recipe("train_dev1", dev1_graph, recipe, overrides or [], seed, selection, dispatch)


@flow(name="process-supervision", flow_run_name="process-supervision-{recipe}")
def process_supervision(
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
    """GRPO with process supervision: a process reward model of Dev1's reasoning, and RL on its scores of steps."""
    selection = StageSelection(start, only, force or (), inputs or {}, approve or ())
    return run_recipe(
        "process_supervision", process_supervision_graph, recipe, overrides or [], seed, selection, dispatch
    )


@dataclass(frozen=True)
class Pipeline:
    """A graph and the flow that runs it."""

    graph: Callable[[Recipe], Sequence[Step]]
    flow: Flow[..., dict[str, Any]]


PIPELINES: dict[PipelineName, Pipeline] = {
    "r1": Pipeline(r1_graph, train_r1),
    "r1_zero": Pipeline(r1_zero_graph, train_r1_zero),
    "distill": Pipeline(distill_graph, distill),
    "rlhf_ppo": Pipeline(rlhf_ppo_graph, rlhf_ppo),
    "dev1": Pipeline(dev1_graph, train_dev1),
    "process_supervision": Pipeline(process_supervision_graph, process_supervision),
}
"""By the name that `--flow` takes."""
