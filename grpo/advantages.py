"""From the rewards of a group to the advantages of its completions."""

from __future__ import annotations

import torch
from torch import Tensor

ZERO_VARIANCE = 1e-6


def group_advantages(rewards: Tensor) -> Tensor:
    """Outcome supervision (DSM 4.1.2): (r_i - mean r) / std r within each group, population std.

    `rewards` is [P, G]: P problems, G completions each. Returns [P, G]. A group whose completions all earned the same
    carries no information: its advantages are 0, not 0/0.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    std = rewards.std(1, correction=0, keepdim=True)
    return torch.where(std > ZERO_VARIANCE, centred / std.clamp(min=ZERO_VARIANCE), torch.zeros_like(centred))


def zero_variance_share(rewards: Tensor) -> float:
    """Share of groups, [P, G] -> 0..1, that teach nothing because all their rewards are equal."""
    return (rewards.std(1, correction=0) <= ZERO_VARIANCE).float().mean().item()
