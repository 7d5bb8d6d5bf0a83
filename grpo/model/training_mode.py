"""A model that computes the same while it is trained: no dropout, no router jitter.

The ratio of a policy to its older self must not be noise, and the probe compares what a model computes in evaluation
mode. So training mode is only switched on in modules that recompute activations, which look for it.
"""

from __future__ import annotations

from types import MethodType
from typing import Any


def without_noise(model: Any) -> None:
    """Changes the model in place, so that `model.train()` does not change what it computes."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)
    model.eval()
    model.train = MethodType(_train, model)


def _train(self: Any, mode: bool = True) -> Any:
    for module in self.modules():
        module.training = mode and bool(getattr(module, "gradient_checkpointing", False))
    return self
