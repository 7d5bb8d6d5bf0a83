"""The models of a run: the policy, and beside it only what its method reads.

GRPO without a penalty holds one model, with it two (policy, reference); PPO three (policy, reference, value). Reward
models come on top. With LoRA the reference is the policy with its adapters off, and takes no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from grpo.logprobs import trunk_of
from grpo.methods import Method
from grpo.policy import load_policy, load_trainable_state, trainable_state
from grpo.rl_config import RL
from grpo.value import Value


class Models:
    def __init__(self, model: str, settings: RL, method: Method):
        self.settings, self.method = settings, method
        hardware = settings.hardware
        self.policy = load_policy(model, hardware, settings.lora)
        self.initial: Any = None
        if method.keeps_initial(settings) and settings.lora is None:
            self.initial = load_policy(model, hardware).requires_grad_(False)
        self.value: Value | None = None
        if method.credit == "value":
            own = settings.ppo.value == "model"
            self.value = Value(trunk_of(load_policy(model, hardware) if own else self.policy), own)

    @contextlib.contextmanager
    def reference(self) -> Iterator[Any]:
        """The policy as it was at the start, or at the last refresh."""
        if self.initial is not None:
            yield self.initial
        else:
            with self.policy.disable_adapter():
                yield self.policy

    @contextlib.contextmanager
    def sampler(self) -> Iterator[Any]:
        """Whose completions the method learns from."""
        if self.method.data == "policy":
            yield self.policy
        else:
            with self.reference() as model:
                yield model

    def parameter_groups(self) -> list[dict[str, Any]]:
        """For the optimizer: the policy and, in PPO, the value, each with its own peak learning rate."""
        peak = self.settings.optimizer.learning_rate
        groups = [{"params": [p for p in self.policy.parameters() if p.requires_grad], "lr": peak}]
        if self.value is not None:
            groups.append({"params": self.value.parameters(), "lr": self.settings.ppo.value_learning_rate or peak})
        return groups

    @torch.no_grad()
    def refresh_reference(self) -> None:
        """The reference becomes the policy (R1), or moves towards it by `reference_mixing`.

        Not where the frozen policy writes the data (rft, dpo): these methods are offline by definition.
        """
        if self.initial is None or self.method.data == "initial":
            return
        for old, new in zip(self.initial.parameters(), self.policy.parameters(), strict=True):
            old.lerp_(new, self.settings.reference_mixing)

    def state(self) -> dict[str, Any]:
        return {
            "policy": trainable_state(self.policy),
            "initial": self.initial.state_dict() if self._reference_moves() else None,
            "value": self.value.state() if self.value is not None else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        load_trainable_state(self.policy, state["policy"])
        if self._reference_moves():
            self.initial.load_state_dict(state["initial"])
        if self.value is not None:
            self.value.restore(state["value"])

    def _reference_moves(self) -> bool:
        return self.initial is not None and self.settings.reference_refresh_steps is not None
