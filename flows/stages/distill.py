"""Distillation: smaller students learn only by SFT from Dev2's samples (R1, distillation).

Each student has two stages, its base model and its SFT, so that changing SFT settings does not pretrain it again. The
paper's students are open models. For recipes without downloads, a student can be a small model pretrained from scratch.
"""

from __future__ import annotations

from flows.stage_contract.stage import Context, Outcome, Stage
from flows.stages import sft
from flows.stages.base_model import base_stage

PREFIX = "student_"


def student_stage(name: str) -> Stage:
    """SFT of the student `name` on the SFT data. The checkpoint has the student's name."""

    def build(context: Context) -> Outcome:
        return sft.train(context, base=base_stage(name).name, model=name)

    return Stage(PREFIX + name, 1, (base_stage(name).name, "sft_data"), build)
