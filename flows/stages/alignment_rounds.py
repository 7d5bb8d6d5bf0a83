"""Later rounds of alignment: reward models follow the policy, and the policy follows them (DSM, algorithm 1).

A round samples the policy of the previous round, judges the responses, continues training the reward models with a
share of earlier preferences, and continues alignment RL, whose reference is now the policy at the start of the round.
Departure from the paper: a round consists of two stages of the recipe instead of being part of one loop, so that each
can be inspected and rerun.
"""

from __future__ import annotations

MODELS, POLICY = "reward_models", "alignment_rl"


def models_name(number: int) -> str:
    """Name of the stage that trains the reward models of round `number`, counted from 1."""
    return MODELS if number == 1 else f"{MODELS}_{number}"


def policy_name(number: int) -> str:
    """Name of the stage that trains the policy of round `number`, counted from 1."""
    return POLICY if number == 1 else f"{POLICY}_{number}"
