"""The two branches of the reward, rules and preference models: their weights, and their shares of the reward.

R1 rewards reasoning prompts by rules, and general prompts by a reward model plus format and language (R1, stage 4). The
weights of the branches are unpublished. If a group's advantages are divided by its standard deviation (GRPO), only
their ratio matters, and only on general prompts, which have both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Literal, get_args

from grpo.config.rl import RL
from grpo.rewards.registry import JUDGE_REWARDS, MODEL_REWARDS

Branch = Literal["rule", "preference"]


def branch_of(reward: str) -> Branch:
    """Branch of a reward: reward models are preferences; all others, including users' functions, are rules."""
    return "preference" if reward in MODEL_REWARDS else "rule"


def reward_weights(settings: RL) -> dict[str, float]:
    """Name of each reward -> its factor in the total: its weight times its branch's weight."""
    # A reward model or a judge without a weight in the recipe still appears in the metrics.
    own = dict.fromkeys(MODEL_REWARDS + JUDGE_REWARDS, 0.0) | {
        name: term.weight for name, term in settings.rewards.items()
    }
    of_branch = settings.branch_weights.model_dump()
    return {name: weight * of_branch[branch_of(name)] for name, weight in own.items()}


def branch_parts(breakdowns: Sequence[Mapping[str, float]], weights: Mapping[str, float]) -> dict[str, float]:
    """Mean and population standard deviation of each branch's weighted part, over the completions that have one."""
    statistics: dict[str, float] = {}
    for branch in get_args(Branch):
        parts = [
            [weights[name] * value for name, value in breakdown.items() if branch_of(name) == branch]
            for breakdown in breakdowns
        ]
        if sums := [sum(part) for part in parts if part]:
            statistics |= {f"{branch}_mean": fmean(sums), f"{branch}_std": pstdev(sums)}
    return statistics
