"""Makes a model compute the same in training mode as in evaluation mode, and in each run: no dropout, no router jitter,
no sums in random order.

The ratio of a policy to its older version must not contain noise, and the probe checks the model in evaluation mode. So
training mode is switched on only in modules that recompute activations, which check for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch


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


@contextmanager
def same_gradients(device: torch.device) -> Iterator[None]:
    """Context for backward passes in which equal inputs have equal gradients, bit for bit. On a GPU some kernels sum in
    the order in which their threads arrive, and a job that was killed must end with the bits of an undisturbed one."""
    if device.type != "cuda":
        yield
        return
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
