"""The two branches of the reward, rules and preference models: their scale, and how much of the reward each makes.

R1 rewards reasoning prompts by rules, and general ones by a reward model besides format and language (R1, stage 4). The
weights of the branches are unpublished. Where a group's advantages are divided by its standard deviation (GRPO) only
their ratio counts, and only on general prompts, where a completion has parts of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Literal, get_args

from grpo.config.rl import RL
from grpo.rewards.registry import MODEL_REWARDS

Branch = Literal["rule", "preference"]


def branch_of(reward: str) -> Branch:
    """Reward models are the preference branch; all else, functions of the user's own too, are rules."""
    return "preference" if reward in MODEL_REWARDS else "rule"


def reward_weights(settings: RL) -> dict[str, float]:
    """Name of each reward -> its factor in the sum: its own weight times its branch's."""
    # A reward model that the recipe gives no weight is shown in the metrics all the same.
    own = dict.fromkeys(MODEL_REWARDS, 0.0) | {name: term.weight for name, term in settings.rewards.items()}
    of_branch = settings.branch_weights.model_dump()
    return {name: weight * of_branch[branch_of(name)] for name, weight in own.items()}


def branch_parts(breakdowns: Sequence[Mapping[str, float]], weights: Mapping[str, float]) -> dict[str, float]:
    """Mean and population std of each branch's weighted part, over the completions that have one."""
    found: dict[str, float] = {}
    for branch in get_args(Branch):
        parts = [
            [weights[name] * value for name, value in breakdown.items() if branch_of(name) == branch]
            for breakdown in breakdowns
        ]
        if sums := [sum(part) for part in parts if part]:
            found |= {f"{branch}_mean": fmean(sums), f"{branch}_std": pstdev(sums)}
    return found
