"""The learned value function of PPO: the expected return before each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo.model.lm_head import backbone_of
from grpo.model.logprobs import completion_states, whole_table
from grpo.model.training_mode import without_noise


class Value(nn.Module):
    """A linear head on the last hidden states of a transformer, either its own or the policy's.

    The head starts at zero, so that GAE's first advantages are the returns themselves.
    """

    def __init__(self, backbone: Any, own_backbone: bool):
        """`own_backbone`: train the backbone as part of this module."""
        super().__init__()
        if own_backbone:
            self.trunk = backbone  # this name is part of the tensors' names in checkpoints
        self._backbone = [backbone]  # a list, so that the policy's backbone is not registered as a submodule
        device = next(backbone.parameters()).device
        # The weights of a model on the meta device are about to be read; those of the head are in no file.
        device = torch.device("cpu") if device.type == "meta" else device
        self.head = nn.Linear(backbone.config.hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


def own_value(policy: Any) -> Value:
    """The value function with the transformer of `policy` as its own."""
    value = Value(backbone_of(policy), True)
    without_noise(value)  # as the policy is, which is no longer around the transformer
    return value


def values_of(value: Value, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Tensor:
    """Values before each completion token, [B, C]; 0 beyond a completion's end."""
    backbone = value.trunk if "trunk" in value._modules else value._backbone[0]
    states, _, rows, columns = completion_states(backbone, prompts, completions)
    values = value.head(states.to(value.head.weight.dtype)).squeeze(1).float()
    table = values.new_zeros(len(prompts), max(map(len, completions)))
    return whole_table(table.index_put((rows, columns), values))
