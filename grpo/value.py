"""The learnt value of PPO: what reward is still to come, seen from before each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo.logprobs import completion_states


class Value:
    """A linear head on the last hidden states of `trunk`, which is a transformer of its own or the policy's.

    The head starts at zero: until it has learnt, GAE's advantages are the returns themselves.
    """

    def __init__(self, trunk: Any, own_trunk: bool):
        self.trunk, self.own_trunk = trunk, own_trunk
        example = next(trunk.parameters())
        self.head = torch.nn.Linear(trunk.config.hidden_size, 1, device=example.device, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def __call__(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Tensor:
        """V before each completion token, [B, C]; positions past a completion's end hold 0."""
        states, _, rows, columns = completion_states(self.trunk, prompts, completions)
        values = self.head(states.float()).squeeze(1)
        return values.new_zeros(len(prompts), max(map(len, completions))).index_put((rows, columns), values)

    def parameters(self) -> list[torch.nn.Parameter]:
        """What only the value learns; a shared trunk belongs to the policy."""
        return [*(self.trunk.parameters() if self.own_trunk else ()), *self.head.parameters()]

    def state(self) -> dict[str, Any]:
        return {"head": self.head.state_dict(), "trunk": self.trunk.state_dict() if self.own_trunk else None}

    def restore(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        if self.own_trunk:
            self.trunk.load_state_dict(state["trunk"])
