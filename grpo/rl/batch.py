"""The two forms of a completion in training: `CompletionGroup` as it was scored, `Rollout` as the update reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo.data.completions import Completion
from grpo.data.records import Problem
from grpo.rewards.functions import Response

TokenStep = tuple[int, float]
"""(index of the token that ends a step, the step's reward)"""


@dataclass
class CompletionGroup:
    """One problem and its scored completions; a list runs over the completions."""

    problem: Problem
    prompt: list[int]
    completions: list[Completion]
    responses: list[Response]
    breakdowns: list[dict[str, float]]
    rewards: Tensor  # [G]
    steps: list[list[TokenStep]] | None
    ref_logprobs: list[Tensor] | None
    old_logprobs: list[Tensor] | None  # under the policy that sampled; None if nothing needs them
    values: list[Tensor] | None


@dataclass
class Rollout:
    """N sequences; the lists run over them, group by group. Vectors are as long as their completion, on the CPU.

    Plain data throughout, so that a checkpoint can hold a rollout that is half used.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    advantages: list[Tensor]
    old_logprobs: list[Tensor] | None  # of the policy before the updates; None: the only update computes them
    ref_logprobs: list[Tensor] | None
    old_values: list[Tensor] | None
    returns: list[Tensor] | None
    learnt: list[bool]  # whether the loss reads the sequence at all
    units: list[list[int]]  # sequences that an update must see together: single ones, or DPO's (better, worse)
    metrics: dict[str, float]
    sampler_logprobs: list[Tensor] | None = None  # where the sampler is not exactly that policy
    experts: list[Tensor] | None = None  # chosen by the sampler, where the update replays them (`Completion.experts`)
    samples: list[dict[str, Any]] = field(default_factory=list)  # a few completions to read

    def mask(self, rows: Sequence[int]) -> list[Tensor]:
        return [torch.full((len(self.completions[i]),), float(self.learnt[i])) for i in rows]
