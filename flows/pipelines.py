"""The pipelines: which stages run, in which order, and what each reads. The method section of the paper.

train_r1:       problems, base -> cold start -> Dev1 -> reasoning RL -> Dev2 -> rejection sampling
                -> SFT from base -> Dev3 -> reward models -> alignment RL -> R1 -> evaluation -> report;
                reward models and alignment RL repeat for each further round of alignment
train_r1_zero:  problems, base -> RL -> R1-Zero -> evaluation -> report
distill:        as train_r1 up to the SFT data -> SFT of each student -> evaluation beside Dev2 -> report
rlhf_ppo:       problems, base -> cold start -> Dev1 -> reward models -> PPO -> evaluation -> report (InstructGPT)
process_supervision:  problems, base -> cold start -> Dev1 -> process reward model -> reasoning RL on the scores of
                steps -> evaluation -> report (DeepSeekMath 4.1.3)

Each is a graph, which is a function from a recipe to its steps in order, and a Prefect flow that runs it. The flows
have the same parameters: the fields of their form in Prefect's UI.
"""

# Annotations are evaluated here, not kept as strings: Prefect may load this file by its path, as a module of another
# name, and then could not look the names up.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prefect import Flow, flow

from flows.recipe.forms import Approve, Dispatched, Force, Only, Overrides, RecipeInputs, RecipeName, RecipeSeed, Start
from flows.recipe.pipeline_names import PipelineName
from flows.recipe.schema import Recipe
from flows.run.executor import run_recipe
from flows.run.plan import StageSelection
from flows.stages import (
    alignment_rl,
    alignment_rounds,
    base_model,
    cold_start_data,
    cold_start_sft,
    evaluate,
    problems,
    process_reward_model,
    r1_zero,
    reasoning_rl,
    report,
    reward_models,
    sft,
    sft_data,
)
from flows.stages import distill as distillation
from flows.stages import rlhf_ppo as ppo
from flows.stages.contract import Step, section_of

Graph = tuple[Step, ...]


def evaluation_and_report(*stages: str, **takes: str) -> Graph:
    """The last two steps: evaluation of the checkpoints of `stages`, and the report."""
    return (
        Step(evaluate.stage_for(stages), partial(evaluate.evaluate, stages=list(stages)), takes=takes),
        Step(report.STAGE, report.report),
    )


TO_DEV1 = (
    Step(problems.STAGE, problems.problems),
    Step(base_model.STAGE, base_model.base),
    Step(cold_start_data.STAGE, cold_start_data.cold_start_data),
    Step(cold_start_sft.STAGE, cold_start_sft.cold_start_sft),
)
TO_SFT_DATA = (
    *TO_DEV1,
    Step(reasoning_rl.STAGE, reasoning_rl.reasoning_rl),
    Step(sft_data.STAGE, sft_data.sft_data),
)
TO_R1 = (
    *TO_SFT_DATA,
    Step(sft.STAGE, sft.sft),
    Step(reward_models.STAGE, reward_models.reward_models),
    Step(alignment_rl.STAGE, alignment_rl.alignment_rl),
)
R1 = (*TO_R1, *evaluation_and_report(*evaluate.R1))
R1_ZERO = (
    Step(problems.STAGE, problems.problems),
    Step(base_model.STAGE, base_model.base),
    Step(r1_zero.STAGE, r1_zero.r1_zero),
    *evaluation_and_report("base", "r1_zero"),
)
RLHF_PPO = (
    *TO_DEV1,
    Step(reward_models.STAGE, reward_models.reward_models, takes={"sft": cold_start_sft.STAGE.name}),
    Step(ppo.STAGE, ppo.rlhf_ppo),
    *evaluation_and_report("base", "cold_start_sft", "reward_models", "rlhf_ppo"),
)


def with_step_model(graph: Graph, recipe: Recipe) -> Graph:
    """The graph with the process reward model after Dev1, if a stage's process supervision reads it."""
    steps = [replace(step, stage=process_reward_model.read_by(step.stage, step.config(recipe))) for step in graph]
    if any(process_reward_model.STAGE.name in step.stage.needs for step in steps):
        place = [step.name for step in steps].index(cold_start_sft.STAGE.name) + 1
        steps.insert(place, Step(process_reward_model.STAGE, process_reward_model.process_reward_model))
    return tuple(steps)


def r1_graph(recipe: Recipe) -> Graph:
    """R1, with as many rounds of reward models and alignment RL as the recipe says."""
    rounds, replay_share = recipe.alignment.rounds, recipe.alignment.replay_share
    if rounds == 1:
        return with_step_model(R1, recipe)
    later_rounds = [
        step
        for number in range(2, rounds + 1)
        for step in (
            Step(
                alignment_rounds.models_stage(number, replay_share),
                partial(alignment_rounds.reward_models_round, number=number, replay_share=replay_share),
                # Preference files are read in the first round; later rounds replay them as history.
                section=lambda r: r.reward_models.model_copy(update={"files": []}),
            ),
            Step(
                alignment_rounds.policy_stage(number),
                partial(alignment_rounds.alignment_rl_round, number=number),
                section=lambda r: r.alignment_rl,
            ),
        )
    ]
    policies = [alignment_rounds.policy_name(number) for number in range(2, rounds + 1)]
    # All checkpoints are scored by the reward models of the last round, which were trained on responses of each round.
    last_models = alignment_rounds.models_name(rounds)
    closing = evaluation_and_report(*evaluate.R1, *policies, reward_models=last_models)
    return with_step_model((*TO_R1, *later_rounds, *closing), recipe)


def r1_zero_graph(recipe: Recipe) -> Graph:
    """The stages of R1-Zero."""
    return R1_ZERO


def distill_graph(recipe: Recipe) -> Graph:
    """One branch for each student in the recipe."""
    names = [student.name for student in section_of(recipe, "distill").students]
    branches = [
        step
        for index, name in enumerate(names)
        for step in (
            Step(
                distillation.base_stage(name),
                partial(distillation.student_base, name=name),
                section=lambda r, i=index: r.distill.students[i].base,  # type: ignore[misc]
            ),
            Step(
                distillation.student_stage(name),
                partial(distillation.student, name=name),
                section=lambda r, i=index: r.distill.students[i].sft,  # type: ignore[misc]
            ),
        )
    ]
    students = [distillation.student_stage(name).name for name in names]
    return with_step_model((*TO_SFT_DATA, *branches, *evaluation_and_report("reasoning_rl", *students)), recipe)


def rlhf_ppo_graph(recipe: Recipe) -> Graph:
    """The stages of InstructGPT's recipe."""
    return RLHF_PPO


def process_supervision_graph(recipe: Recipe) -> Graph:
    """Reasoning RL as the recipe has it, but supervised by its process reward model."""
    on_steps = {"supervision": "process", "step_reward": process_reward_model.STAGE.name}
    rl = Step(
        reasoning_rl.STAGE,
        reasoning_rl.reasoning_rl,
        section=lambda r: r.reasoning_rl.model_copy(update=on_steps),
    )
    return with_step_model((*TO_DEV1, rl, *evaluation_and_report("base", "cold_start_sft", "reasoning_rl")), recipe)


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
    "process_supervision": Pipeline(process_supervision_graph, process_supervision),
}
"""By the name that `--flow` takes."""
