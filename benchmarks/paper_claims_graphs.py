"""Graphs of the study of the papers' claims, made of the recipe's own stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from paper_claims_design import Graph

from flows.recipe.schema import Recipe
from flows.stage_contract.stage import Step, section_of
from flows.stage_graphs import R1_ZERO, TO_DEV1, TO_SFT_DATA, as_configured, evaluation_and_report
from flows.stages import base_model, process_reward_model, reasoning_rl
from flows.stages import distill as distillation

STUDENT = "small"
"""Name of the smaller model, the recipe's first student."""
RL_STAGE: Mapping[Graph, str] = {"rl": "reasoning_rl", "small": "reasoning_rl", "zero": "r1_zero"}
CHECKPOINT: Mapping[Graph, str] = {"dev1": "dev1", "rl": "dev2", "small": "dev2", "zero": "zero", "distill": STUDENT}
"""Graph -> name of the checkpoint in the closing table."""


def _evaluation(*stages: str) -> Step:
    return evaluation_and_report(*stages)[0]


RL = Step(reasoning_rl.STAGE)
SMALL_BASE = Step(
    base_model.base_stage(STUDENT),
    "base",
    {"student": STUDENT},
    section=lambda recipe: section_of(recipe, "distill").students[0].base,
)
STUDENT_SFT = Step(
    distillation.student_stage(STUDENT),
    "student",
    {"name": STUDENT},
    section=lambda recipe: section_of(recipe, "distill").students[0].sft,
)


def _from_small_base(step: Step) -> Step:
    return replace(step, takes={**step.takes, "base": SMALL_BASE.name}) if "base" in step.stage.needs else step


GRAPHS: Mapping[Graph, Callable[[Recipe], Sequence[Step]]] = {
    "dev1": partial(as_configured, (*TO_DEV1, _evaluation("cold_start_sft"))),
    "rl": partial(as_configured, (*TO_DEV1, RL, _evaluation("reasoning_rl"))),
    "zero": lambda recipe: R1_ZERO[:-1],  # without the report
    "small": partial(
        as_configured,
        (
            TO_DEV1[0],
            SMALL_BASE,
            *map(_from_small_base, TO_DEV1[2:]),
            RL,
            _evaluation("reasoning_rl"),
        ),
    ),
    "distill": partial(as_configured, (*TO_SFT_DATA, SMALL_BASE, STUDENT_SFT, _evaluation(STUDENT_SFT.name))),
}


def every_step(graphs: Iterable[Graph], recipe: Recipe) -> list[Step]:
    """All steps of the graphs, and the process reward model where the recipe has one, which some arms add.

    Raises:
        InputError: the recipe lacks a section.
    """
    steps = [step for graph in graphs for step in GRAPHS[graph](recipe)]
    return steps if recipe.process_reward_model is None else [*steps, Step(process_reward_model.STAGE)]
