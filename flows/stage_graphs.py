"""The graphs: which stages run, in which order, and what each reads. The method section of the paper.

train_r1:       problems, base -> cold start -> Dev1 -> reasoning RL -> Dev2 -> rejection sampling
                -> SFT from base -> Dev3 -> reward models -> alignment RL -> R1 -> evaluation -> report;
                reward models and alignment RL repeat for each further round of alignment
train_r1_zero:  problems, base -> RL -> R1-Zero -> evaluation -> report
distill:        as train_r1 up to the SFT data -> SFT of each student -> evaluation with Dev2 -> report
rlhf_ppo:       problems, base -> cold start -> Dev1 -> reward models -> PPO -> evaluation -> report (InstructGPT)
train_dev1:     problems, base -> R1-Zero -> its trajectories rewritten -> Dev1 -> evaluation -> report (R1, stage 1);
                train_r1 also begins like this if cold_start_data.source is "r1_zero"
process_supervision:  problems, base -> cold start -> Dev1 -> process reward model -> reasoning RL on the scores of
                steps -> evaluation -> report (DeepSeekMath 4.1.3)

Each graph is a function that returns a recipe's steps in order. The Prefect flows that run them are in
flows/prefect_flows.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from pydantic import BaseModel

from flows.recipe.data_sections import ColdStartData
from flows.recipe.pipeline_names import PipelineName
from flows.recipe.schema import Recipe
from flows.stage_contract.stage import Step, section_of
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

Graph = tuple[Step, ...]


def evaluation_and_report(*stages: str, **takes: str) -> Graph:
    """The last two steps: evaluation of the checkpoints of `stages`, and the report."""
    return (
        Step(evaluate.stage_for(stages), parameters={"stages": list(stages)}, takes=takes),
        Step(report.STAGE),
    )


def problems_with_test_sets(recipe: Recipe) -> BaseModel:
    """The section of the first stage, extended so that the evaluation's test sets are entirely held out from the
    start."""
    own = {of.name for of in recipe.problems.test_sets}
    sets = [of.data for of in recipe.evaluate.sets if of.name not in own]
    return recipe.problems.model_copy(update={"test_sets": [*recipe.problems.test_sets, *sets]})


TO_DEV1 = (
    Step(problems.STAGE, section=problems_with_test_sets),
    Step(base_model.STAGE),
    Step(cold_start_data.STAGE),
    Step(cold_start_sft.STAGE),
)
TO_SFT_DATA = (
    *TO_DEV1,
    Step(reasoning_rl.STAGE),
    Step(sft_data.STAGE),
)
TO_R1 = (
    *TO_SFT_DATA,
    Step(sft.STAGE),
    Step(reward_models.STAGE),
    Step(alignment_rl.STAGE),
)
R1 = (*TO_R1, *evaluation_and_report(*evaluate.R1))
R1_ZERO = (
    Step(problems.STAGE, section=problems_with_test_sets),
    Step(base_model.STAGE),
    Step(r1_zero.STAGE),
    *evaluation_and_report("base", "r1_zero"),
)
RLHF_PPO = (
    *TO_DEV1,
    Step(reward_models.STAGE, takes={"sft": cold_start_sft.STAGE.name}),
    Step(ppo.STAGE),
    *evaluation_and_report("base", "cold_start_sft", "reward_models", "rlhf_ppo"),
)


def as_configured(graph: Graph, recipe: Recipe) -> Graph:
    """The graph with additional stages that the settings require: R1-Zero before the cold start, if its trajectories
    are rewritten, and the process reward model after Dev1, if a stage's process supervision reads it."""
    steps = [replace(step, stage=process_reward_model.read_by(step.stage, step.config(recipe))) for step in graph]
    names = [step.name for step in steps]
    if cold_start_data.STAGE.name in names:
        place = names.index(cold_start_data.STAGE.name)
        stage = cold_start_data.stage_of(cast(ColdStartData, steps[place].config(recipe)))
        steps[place] = replace(steps[place], stage=stage)
        if r1_zero.STAGE.name in stage.needs and r1_zero.STAGE.name not in names:
            steps.insert(place, Step(r1_zero.STAGE))
    if any(process_reward_model.STAGE.name in step.stage.needs for step in steps):
        place = [step.name for step in steps].index(cold_start_sft.STAGE.name) + 1
        steps.insert(place, Step(process_reward_model.STAGE))
    return tuple(steps)


def r1_graph(recipe: Recipe) -> Graph:
    """The stages of R1, with the recipe's number of rounds of reward models and alignment RL."""
    rounds, replay_share = recipe.alignment.rounds, recipe.alignment.replay_share
    if rounds == 1:
        return as_configured(R1, recipe)
    later_rounds = [
        step
        for number in range(2, rounds + 1)
        for step in (
            Step(
                reward_models.models_stage(number, replay_share),
                "reward_models",
                {"round": number, "replay_share": replay_share},
                # Preference files are read in the first round. Later rounds replay them as history.
                section=lambda r: r.reward_models.model_copy(update={"files": []}),
            ),
            Step(
                alignment_rl.policy_stage(number),
                "alignment_rl",
                {"round": number},
                section=lambda r: r.alignment_rl,
            ),
        )
    ]
    policies = [alignment_rounds.policy_name(number) for number in range(2, rounds + 1)]
    # All checkpoints are scored by the reward models of the last round, which were trained on responses of every round.
    last_models = alignment_rounds.models_name(rounds)
    closing = evaluation_and_report(*evaluate.R1, *policies, reward_models=last_models)
    return as_configured((*TO_R1, *later_rounds, *closing), recipe)


def r1_zero_graph(recipe: Recipe) -> Graph:
    """The stages of R1-Zero."""
    return R1_ZERO


def distill_graph(recipe: Recipe) -> Graph:
    """The stages of distillation, with one branch per student in the recipe."""
    names = [student.name for student in section_of(recipe, "distill").students]
    branches = [
        step
        for index, name in enumerate(names)
        for step in (
            Step(
                base_model.base_stage(name),
                "base",
                {"student": name},
                section=lambda r, i=index: r.distill.students[i].base,  # type: ignore[misc]
            ),
            Step(
                distillation.student_stage(name),
                "student",
                {"name": name},
                section=lambda r, i=index: r.distill.students[i].sft,  # type: ignore[misc]
            ),
        )
    ]
    students = [distillation.student_stage(name).name for name in names]
    return as_configured((*TO_SFT_DATA, *branches, *evaluation_and_report("reasoning_rl", *students)), recipe)


def rlhf_ppo_graph(recipe: Recipe) -> Graph:
    """The stages of InstructGPT's recipe."""
    return as_configured(RLHF_PPO, recipe)


def dev1_graph(recipe: Recipe) -> Graph:
    """Stage 1 as published: R1-Zero, rewriting of its trajectories, Dev1."""

    def section(recipe: Recipe) -> ColdStartData:
        own = recipe.cold_start_data
        return own if own.source == cold_start_data.ZERO else section_of(recipe, "cold_start_from_zero")

    to_dev1 = [replace(step, section=section) if step.name == cold_start_data.STAGE.name else step for step in TO_DEV1]
    return as_configured((*to_dev1, *evaluation_and_report("base", "r1_zero", "cold_start_sft")), recipe)


def process_supervision_graph(recipe: Recipe) -> Graph:
    """Reasoning RL as in the recipe, but supervised by its process reward model."""
    on_steps = {"supervision": "process", "step_reward": process_reward_model.STAGE.name}
    rl = Step(
        reasoning_rl.STAGE,
        section=lambda r: r.reasoning_rl.model_copy(update=on_steps),
    )
    return as_configured((*TO_DEV1, rl, *evaluation_and_report("base", "cold_start_sft", "reasoning_rl")), recipe)


GRAPHS: dict[PipelineName, Callable[[Recipe], Graph]] = {
    "r1": r1_graph,
    "r1_zero": r1_zero_graph,
    "distill": distill_graph,
    "rlhf_ppo": rlhf_ppo_graph,
    "dev1": dev1_graph,
    "process_supervision": process_supervision_graph,
}
"""Name in `--flow` -> graph."""
