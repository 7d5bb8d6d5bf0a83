"""Helpers for autograd functions with a handwritten backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def call(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """`function.apply`, or only its forward pass if gradients are off, which saves autograd's overhead."""
    return function.apply(*inputs) if torch.is_grad_enabled() else function.forward(_NoGradient, *inputs)


class _NoGradient:
    """Autograd context of a forward pass that saves nothing."""

    needs_input_grad = (False,)

    @staticmethod
    def save_for_backward(*tensors: Tensor | None) -> None:
        pass


def add_product(weight: Tensor, a: Tensor, b: Tensor) -> Tensor | None:
    """Accumulates the gradient a^T b of `weight`: adds it to `weight.grad` in place and returns None, or returns it if
    `weight.grad` is None."""
    if weight.grad is None or not weight.is_leaf:
        return a.t() @ b
    weight.grad.addmm_(a.t(), b)
    return None
