"""Alignment RL: GRPO on reasoning and, in the last steps, general prompts, Dev3 -> R1 (R1, stage 4)."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.states import State

from flows.recipe.forms import Inputs, Seed
from flows.stages.contract import Context, Outcome, RunContext, Stage
from flows.stages.process_reward_model import read_by
from flows.stages.reasoning_rl import files, train, user_code
from flows.stages.reward_models import HELPFUL, SAFE
from flows.stages.runner import run_stage
from flows.stages.sft_data import EXAMPLES
from grpo.config.rl import RL


def build(context: Context) -> Outcome:
    """R1: trains Dev3 on rules and reward models."""
    return align(context, policy="sft", reward_models="reward_models", model="r1")


def align(context: Context, policy: str, reward_models: str, model: str, **job: Any) -> Outcome:
    """GRPO from the input `policy` against the input `reward_models`; the checkpoint is called `model`."""
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


STAGE = Stage("alignment_rl", 5, ("problems", "sft_data", "sft", "reward_models"), build, files=files, extra=user_code)


@flow(name=STAGE.name)
def alignment_rl(config: RL, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """GRPO with rule rewards, and preference rewards in the last steps: R1."""
    return run_stage(read_by(STAGE, config), config, inputs or {}, seed, where or RunContext())
