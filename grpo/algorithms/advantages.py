"""Advantages from the rewards of a group: one per completion or, under process supervision, one per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from grpo.errors import InputError

ZERO_VARIANCE = 1e-6  # a smaller spread, relative to the rewards, counts as rounding

Std = Literal["population", "sample"]  # divide the sum of squares by n (DSM, R1) or by n - 1 (TRL, torch's default)
CORRECTION: dict[str, int] = {"population": 0, "sample": 1}


def _has_variance(rewards: Tensor) -> Tensor:
    """[P, G] -> bool [P, 1]: whether a group's rewards differ."""
    spread = rewards.amax(1, keepdim=True) - rewards.amin(1, keepdim=True)
    return spread > ZERO_VARIANCE * rewards.abs().amax(1, keepdim=True).clamp(min=1)


def _zero_without_variance(advantages: Tensor, rewards: Tensor) -> Tensor:
    """Sets the advantages of groups with equal rewards to 0, where the formulas give 0/0 or rounding errors."""
    return torch.where(_has_variance(rewards), advantages, torch.zeros_like(advantages))


def _minus_mean(rewards: Tensor) -> Tensor:
    return rewards - rewards.mean(1, keepdim=True)


def by_group_std(rewards: Tensor, std: Std = "population") -> Tensor:
    """(r_i - mean r) / std r within each group (GRPO's outcome supervision, DSM 4.1.2)."""
    deviation = rewards.std(1, correction=min(CORRECTION[std], rewards.shape[1] - 1), keepdim=True)
    return _zero_without_variance(_minus_mean(rewards) / deviation, rewards)


def centered(rewards: Tensor, std: Std = "population") -> Tensor:
    """r_i - mean r (Dr. GRPO, arXiv 2503.20783): no extra weight for very hard or easy problems. `std` is ignored."""
    return _zero_without_variance(_minus_mean(rewards), rewards)


def by_batch_std(rewards: Tensor, std: Std = "population") -> Tensor:
    """(r_i - group mean) / (std of all rewards of the batch)."""
    deviation = rewards.std(correction=min(CORRECTION[std], rewards.numel() - 1))
    return _zero_without_variance(_minus_mean(rewards) / deviation, rewards)


def leave_one_out(rewards: Tensor, std: Std = "population") -> Tensor:
    """r_i - mean of the others' rewards (RLOO, arXiv 2402.14740). `std` is ignored."""
    others = max(rewards.shape[1] - 1, 1)
    return _zero_without_variance((rewards * rewards.shape[1] - rewards.sum(1, keepdim=True)) / others, rewards)


# (rewards [P, G]: P problems, G completions each; which std) -> advantages [P, G].
ADVANTAGES: dict[str, Callable[[Tensor, Std], Tensor]] = {
    "grpo": by_group_std,
    "dr_grpo": centered,
    "batch_std": by_batch_std,
    "rloo": leave_one_out,
}


def zero_variance_groups(rewards: Tensor) -> Tensor:
    """[P, G] -> bool [P]: groups with equal rewards, whose advantages are all 0."""
    return ~_has_variance(rewards).squeeze(1)


def process_advantages(
    step_rewards: Sequence[Sequence[float]], step_ends: Sequence[Sequence[int]], lengths: Sequence[int], std: Std
) -> Tensor:
    """Process supervision (DSM 4.1.3) for the G completions of one group: a token's advantage is the sum of the
    normalised rewards of the steps that end at it or later.

    `step_rewards[i][j]` is the reward of step j of completion i, `step_ends[i][j]` the index of its last token within
    the completion, `lengths[i]` the completion's number of tokens. Rewards are normalised by mean and std over all
    steps of the group. Returns [G, T], with T the longest length. The values are 0 in the padding, after a completion's
    last step, in a completion without steps, and everywhere if the rewards do not differ. Raises InputError if the
    three arguments are inconsistent.
    """
    for i, (rewards, ends, length) in enumerate(zip(step_rewards, step_ends, lengths, strict=True)):
        if len(rewards) != len(ends):
            raise InputError(f"completion {i}: {len(rewards)} step rewards for {len(ends)} steps; give one a step")
        if any(not 0 <= end < length for end in ends):
            raise InputError(f"completion {i}: steps end at {list(ends)}, but its tokens are 0 to {length - 1}")
    at_ends = torch.zeros(len(lengths), max(lengths, default=0))
    rows = [i for i, ends in enumerate(step_ends) for _ in ends]
    if not rows:
        return at_ends
    flat = torch.tensor([[float(reward) for rewards in step_rewards for reward in rewards]])
    columns = torch.tensor([end for ends in step_ends for end in ends])
    at_ends.index_put_((torch.tensor(rows), columns), by_group_std(flat, std)[0], accumulate=True)
    return at_ends.flip(1).cumsum(1).flip(1)
