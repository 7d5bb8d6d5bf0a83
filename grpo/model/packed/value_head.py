"""The learnt value of PPO: what reward is still to come, seen from before each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo.model.packed.logprobs import completion_states


class Value(nn.Module):
    """A linear head on the last hidden states of `trunk`, which is a transformer of its own or the policy's.

    The head starts at zero: until it has learnt, GAE's advantages are the returns themselves.
    """

    def __init__(self, trunk: Any, own_trunk: bool):
        super().__init__()
        if own_trunk:
            self.trunk = trunk
        self._trunk = [trunk]  # a list, so that the policy's is no part of the value
        example = next(trunk.parameters())
        self.head = nn.Linear(trunk.config.hidden_size, 1, device=example.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


def values_of(value: Value, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Tensor:
    """V before each completion token, [B, C]; positions past a completion's end hold 0."""
    trunk = value.trunk if "trunk" in value._modules else value._trunk[0]
    states, _, rows, columns = completion_states(trunk, prompts, completions)
    values = value.head(states.to(value.head.weight.dtype)).squeeze(1).float()
    return values.new_zeros(len(prompts), max(map(len, completions))).index_put((rows, columns), values)
