"""Distillation: smaller students learn only by SFT from Dev2's samples (R1, distillation).

Each student has two stages, its base model and its SFT, so that changing SFT settings does not pretrain it again. The
paper's students are open models. For recipes without downloads, a student can be a small model pretrained from scratch.
"""

from __future__ import annotations

from prefect.states import State

from flows.recipe.forms import Inputs, Seed, StudentName
from flows.stage_contract.runner import run_stage
from flows.stage_contract.stage import Context, Outcome, RunContext, Stage
from flows.stage_contract.stage_flow import stage_flow
from flows.stages import sft
from flows.stages.base_model import base_stage
from grpo.config.supervised import SFT

PREFIX = "student_"


def student_stage(name: str) -> Stage:
    """SFT of the student `name` on the SFT data. The checkpoint has the student's name."""

    def build(context: Context) -> Outcome:
        return sft.train(context, base=base_stage(name).name, model=name)

    return Stage(PREFIX + name, 1, (base_stage(name).name, "sft_data"), build)


@stage_flow("student", lambda parameters: PREFIX + parameters["name"])
def student(
    config: SFT, name: StudentName, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None
) -> State:
    """Fine-tune a student on the rejection-sampled data."""
    return run_stage(student_stage(name), config, inputs or {}, seed, where or RunContext())
