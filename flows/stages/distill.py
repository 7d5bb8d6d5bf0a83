"""Distillation: smaller students learn by SFT alone from what Dev2 wrote (R1, distillation).

Each student is two stages, its base model and its SFT, so that other SFT settings do not pretrain it again. The paper's
students are open models; a small one made from nothing is here for recipes without downloads.
"""

from __future__ import annotations

from dataclasses import replace

from prefect import flow
from prefect.states import State

from flows.recipe.forms import Inputs, Seed
from flows.recipe.sections import Base
from flows.stages import base_model, sft
from flows.stages.contract import Context, Outcome, RunContext, Stage
from flows.stages.runner import run_stage
from grpo.config.supervised import SFT

PREFIX = "student_"


def base_stage(name: str) -> Stage:
    """The base model of the student `name`."""
    return replace(base_model.STAGE, name=f"base_{name}")


def student_stage(name: str) -> Stage:
    """SFT of the student `name` on the SFT data; the checkpoint has the student's name."""

    def build(context: Context) -> Outcome:
        return sft.train(context, base=base_stage(name).name, model=name)

    return Stage(PREFIX + name, 1, (base_stage(name).name, "sft_data"), build)


@flow(name="student_base", flow_run_name="base_{name}")
def student_base(
    config: Base, name: str, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None
) -> State:
    """Take a student's base model into the store, or pretrain a small one."""
    return run_stage(base_stage(name), config, inputs or {}, seed, where or RunContext())


@flow(name="student", flow_run_name="student_{name}")
def student(config: SFT, name: str, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """Fine-tune a student on the rejection-sampled data."""
    return run_stage(student_stage(name), config, inputs or {}, seed, where or RunContext())
