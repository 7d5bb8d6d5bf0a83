"""R1-Zero: GRPO from the base model with a plain-text template, without SFT (R1, section 2)."""

from __future__ import annotations

from flows.stage_contract.stage import Context, Outcome, Stage
from flows.stages.base_model import zero_template
from flows.stages.reasoning_rl import files, train, user_code


def build(context: Context) -> Outcome:
    """Makes R1-Zero by training the base model with reinforcement learning."""
    template = zero_template(context.path("base"))
    return train(context, policy="base", model="zero", template="r1_zero", zero_template=template)


STAGE = Stage("r1_zero", 5, ("problems", "base"), build, files=files, extra=user_code)
