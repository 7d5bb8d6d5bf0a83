"""Later rounds of alignment: reward models follow the policy, and the policy follows them (DSM, algorithm 1).

A round samples the policy of the previous round, judges the responses, continues to train the reward models with a
share of earlier preferences, and continues alignment RL, whose reference is now the policy at the start of the round.
Departure from the paper: a round is two stages of the recipe instead of a part of one loop, so that each can be
inspected and rerun.
"""

from __future__ import annotations

from prefect import flow
from prefect.states import State

from flows.recipe.forms import Inputs, Seed
from flows.recipe.sections import RewardModels
from flows.stages import alignment_rl, reward_models
from flows.stages.contract import Context, Outcome, RunContext, Stage
from flows.stages.process_reward_model import read_by
from flows.stages.reasoning_rl import files, user_code
from flows.stages.runner import run_stage
from grpo.config.rl import RL


def models_name(number: int) -> str:
    """Name of the stage that trains the reward models of round `number`, from 1 on."""
    return reward_models.STAGE.name if number == 1 else f"{reward_models.STAGE.name}_{number}"


def policy_name(number: int) -> str:
    """Name of the stage that trains the policy of round `number`, from 1 on."""
    return alignment_rl.STAGE.name if number == 1 else f"{alignment_rl.STAGE.name}_{number}"


def models_stage(number: int, replay_share: float) -> Stage:
    """Reward models of round `number`, from 2 on."""
    first, policy = reward_models.STAGE, policy_name(number - 1)
    earlier = tuple(models_name(n) for n in range(1, number))
    turn = reward_models.Round(policy, earlier, replay_share)
    return Stage(
        models_name(number),
        first.version,
        ("problems", policy, *earlier),
        lambda context: reward_models.build(context, turn),
        extra=lambda config: {**first.extra(config), "replay_share": replay_share},
    )


def policy_stage(number: int) -> Stage:
    """Alignment RL of round `number`, from 2 on. It has another seed, so that its prompts come in another order."""
    policy, models = policy_name(number - 1), models_name(number)

    def build(context: Context) -> Outcome:
        return alignment_rl.align(context, policy, models, f"r1_{number}", seed=context.seed + number - 1)

    needs = ("problems", "sft_data", policy, models)
    return Stage(policy_name(number), alignment_rl.STAGE.version, needs, build, files=files, extra=user_code)


@flow(name="reward_models_round", flow_run_name="reward_models_{number}")
def reward_models_round(
    config: RewardModels,
    number: int,
    replay_share: float,
    inputs: Inputs = None,
    seed: Seed = 0,
    where: RunContext | None = None,
) -> State:
    """Train the reward models on, with responses of the policy that the last round made."""
    return run_stage(models_stage(number, replay_share), config, inputs or {}, seed, where or RunContext())


@flow(name="alignment_rl_round", flow_run_name="alignment_rl_{number}")
def alignment_rl_round(
    config: RL, number: int, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None
) -> State:
    """Go on with alignment RL against this round's reward models."""
    stage = read_by(policy_stage(number), config)
    return run_stage(stage, config, inputs or {}, seed, where or RunContext())
