"""Alignment RL, Dev3 -> R1: GRPO on reasoning prompts and, in the last steps, general prompts (R1, stage 4)."""

from __future__ import annotations

from typing import Any

from flows.stage_contract.stage import Context, Outcome, Stage
from flows.stages.alignment_rounds import POLICY, models_name, policy_name
from flows.stages.reasoning_rl import files, train, user_code
from flows.stages.reward_models import HELPFUL, SAFE
from flows.stages.sft_data import EXAMPLES


def build(context: Context) -> Outcome:
    """Makes R1 by training Dev3 with rules and reward models."""
    return align(context, policy="sft", reward_models="reward_models", model="r1")


def align(context: Context, policy: str, reward_models: str, model: str, **job: Any) -> Outcome:
    """GRPO from the input `policy` against the input `reward_models`. The checkpoint is named `model`."""
    models = context.path(reward_models)
    return train(
        context,
        policy=policy,
        model=model,
        helpful_model=str(models / HELPFUL),
        safe_model=str(models / SAFE),
        demonstrations=context.path("sft_data") / EXAMPLES,
        **job,
    )


STAGE = Stage(POLICY, 5, ("problems", "sft_data", "sft", "reward_models"), build, files=files, extra=user_code)


def policy_stage(number: int) -> Stage:
    """Alignment RL of round `number`. A later round has a different seed, so that its prompts come in a different
    order."""
    if number == 1:
        return STAGE
    policy, models = policy_name(number - 1), models_name(number)

    def build(context: Context) -> Outcome:
        return align(context, policy, models, f"r1_{number}", seed=context.seed + number - 1)

    needs = ("problems", "sft_data", policy, models)
    return Stage(policy_name(number), STAGE.version, needs, build, files=files, extra=user_code)
