"""The graphs of the recipes: which stages, in which order, and what each takes from which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import BaseModel

from flows.recipe.schema import Recipe
from flows.stages import (
    alignment_rl,
    alignment_rounds,
    base,
    cold_start_data,
    cold_start_sft,
    distill,
    evaluate,
    problems,
    r1_zero,
    reasoning_rl,
    report,
    reward_models,
    rlhf_ppo,
    sft,
    sft_data,
)
from flows.stages.contract import Stage
from grpo.errors import InputError


@dataclass(frozen=True)
class Step:
    """A stage in a recipe: its contract and the Prefect flow that runs it."""

    stage: Stage
    flow: Callable[..., Any]
    takes: Mapping[str, str] = field(default_factory=dict)  # input -> the step that makes it, where names differ
    section: Callable[[Recipe], BaseModel] | None = None  # None: the recipe's section that has the stage's name

    @property
    def name(self) -> str:
        return self.stage.name

    def config(self, recipe: Recipe) -> BaseModel:
        """What of the recipe the stage is configured by."""
        return self.section(recipe) if self.section else section_of(recipe, self.name)

    @property
    def inputs(self) -> dict[str, str]:
        """Input of the stage -> the step that makes it."""
        return {name: self.takes.get(name, name) for name in self.stage.needs}


def section_of(recipe: Recipe, name: str) -> Any:
    section = getattr(recipe, name)
    if section is None:
        raise InputError(f"recipe {recipe.name!r} has no section {name}; add it to run this flow")
    return section


def _closing(*stages: str, **takes: str) -> tuple[Step, Step]:
    """Evaluation of what these stages make, and the report of it."""
    return (
        Step(evaluate.stage_for(stages), partial(evaluate.evaluate, stages=list(stages)), takes=takes),
        Step(report.STAGE, report.report),
    )


TO_DEV1 = (
    Step(problems.STAGE, problems.problems),
    Step(base.STAGE, base.base),
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
R1 = (*TO_R1, *_closing(*evaluate.R1))
R1_ZERO = (
    Step(problems.STAGE, problems.problems),
    Step(base.STAGE, base.base),
    Step(r1_zero.STAGE, r1_zero.r1_zero),
    *_closing("base", "r1_zero"),
)
RLHF_PPO = (
    *TO_DEV1,
    Step(reward_models.STAGE, reward_models.reward_models, takes={"sft": cold_start_sft.STAGE.name}),
    Step(rlhf_ppo.STAGE, rlhf_ppo.rlhf_ppo),
    *_closing("base", "cold_start_sft", "reward_models", "rlhf_ppo"),
)


def alignment(recipe: Recipe) -> tuple[Step, ...]:
    """R1, with as many rounds of reward models and alignment RL as the recipe says."""
    last, share = recipe.alignment.rounds, recipe.alignment.replay_share
    if last == 1:
        return R1
    later = [
        step
        for number in range(2, last + 1)
        for step in (
            Step(
                alignment_rounds.models_stage(number, share),
                partial(alignment_rounds.reward_models_round, number=number, replay_share=share),
                # Files were read in the first round: from then on they are history.
                section=lambda r: r.reward_models.model_copy(update={"files": []}),
            ),
            Step(
                alignment_rounds.policy_stage(number),
                partial(alignment_rounds.alignment_rl_round, number=number),
                section=lambda r: r.alignment_rl,
            ),
        )
    ]
    policies = [alignment_rounds.policy_name(number) for number in range(2, last + 1)]
    # The last reward models know the responses of all checkpoints best.
    return *TO_R1, *later, *_closing(*evaluate.R1, *policies, reward_models=alignment_rounds.models_name(last))


def distillation(recipe: Recipe) -> tuple[Step, ...]:
    """As many branches as the recipe lists students."""
    listed = section_of(recipe, "distill").students
    names = [student.name for student in listed]
    trained = [
        step
        for place, name in enumerate(names)
        for step in (
            Step(
                distill.base_stage(name),
                partial(distill.student_base, name=name),
                section=lambda r, i=place: r.distill.students[i].base,  # type: ignore[misc]
            ),
            Step(
                distill.student_stage(name),
                partial(distill.student, name=name),
                section=lambda r, i=place: r.distill.students[i].sft,  # type: ignore[misc]
            ),
        )
    ]
    return (
        *TO_SFT_DATA,
        *trained,
        *_closing("reasoning_rl", *(distill.student_stage(name).name for name in names)),
    )


GRAPHS: dict[str, Callable[[Recipe], Sequence[Step]]] = {
    "r1": alignment,
    "r1_zero": lambda recipe: R1_ZERO,
    "distill": distillation,
    "rlhf_ppo": lambda recipe: RLHF_PPO,
}
