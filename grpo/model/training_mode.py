"""Makes a model compute the same in training mode as in evaluation mode: no dropout, no router jitter.

The ratio of a policy to its older version must not contain noise, and the probe checks the model in evaluation mode. So
training mode is switched on only in modules that recompute activations, which check for it.
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
