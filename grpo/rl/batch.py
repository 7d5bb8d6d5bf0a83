"""The two forms of a completion in training: `CompletionGroup` as scored, `Rollout` as the update reads it."""

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
    """One problem and its scored completions. Each list has one entry per completion."""

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
    given: list[dict[str, float]] = field(default_factory=list)  # see `Scored.given`; empty: no verdicts to compare


@dataclass
class Rollout:
    """N sequences. Each list has one entry per sequence, group by group; each vector has one entry per completion token
    and is on the CPU.

    Holds only plain data, so that a checkpoint can save a partly used rollout.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    advantages: list[Tensor]
    old_logprobs: list[Tensor] | None  # under the policy before the updates; None: the only update computes them
    ref_logprobs: list[Tensor] | None
    old_values: list[Tensor] | None
    returns: list[Tensor] | None
    learnt: list[bool]  # whether the loss includes the sequence
    units: list[list[int]]  # sequences that one update must contain: [i], or DPO's [better, worse]
    metrics: dict[str, float]
    sampler_logprobs: list[Tensor] | None = None  # only if the sampler is not exactly that policy
    experts: list[Tensor] | None = None  # chosen by the sampler, if the update replays them (`Completion.experts`)
    max_new_tokens: int | None = None  # limit under which they were sampled; None: given, or by an earlier version
    samples: list[dict[str, Any]] = field(default_factory=list)  # a few completions to read

    def mask(self, rows: Sequence[int]) -> list[Tensor]:
        return [torch.full((len(self.completions[i]),), float(self.learnt[i])) for i in rows]
