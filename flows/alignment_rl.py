"""Alignment RL: GRPO on reasoning and, in the last steps, general prompts, Dev3 -> R1 (R1, stage 4)."""

from __future__ import annotations

from prefect import flow
from prefect.states import State

from flows.forms import Inputs, Seed
from flows.reasoning_rl import train, user_code
from flows.reward_models import HELPFUL, SAFE
from flows.sft_data import EXAMPLES
from flows.stage import Context, Outcome, Stage, Where, run_stage
from grpo.rl_config import RL


def build(context: Context) -> Outcome:
    models = context.path("reward_models")
    return train(
        context,
        policy="sft",
        model="r1",
        helpful_model=str(models / HELPFUL),
        safe_model=str(models / SAFE),
        demonstrations=context.path("sft_data") / EXAMPLES,
    )


STAGE = Stage("alignment_rl", 4, ("problems", "sft_data", "sft", "reward_models"), build, extra=user_code)


@flow(name=STAGE.name)
def alignment_rl(config: RL, inputs: Inputs = None, seed: Seed = 0, where: Where | None = None) -> State:
    """GRPO with rule rewards, and preference rewards in the last steps: R1."""
    return run_stage(STAGE, config, inputs or {}, seed, where or Where())
