"""Gradients on a GPU whose sums have a fixed order, so that equal inputs have equal gradients, bit for bit.

Many kernels add up in the order in which their threads arrive. A job that was killed and goes on must end with the bits
of an undisturbed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def ordered_gradients(device: torch.device) -> Iterator[None]:
    """Context for backward passes. Kernels that have no fixed order are used with a warning."""
    if device.type != "cuda":
        yield
        return
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # slow
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def with_ordered_gradients(attended: Tensor) -> Tensor:
    """The output of `scaled_dot_product_attention`, whose backward pass has a fixed order within `ordered_gradients`.

    PyTorch's attention kernels have one only if others without one would raise. So that mode is on for their backward
    pass alone.
    """
    node: Any = attended.grad_fn if attended.is_cuda else None
    while node is not None and "Attention" not in node.name():  # a view of the kernel's output
        node = node.next_functions[0][0] if node.next_functions else None
    if node is not None:
        node.register_prehook(lambda _: _raise_without_order(True))
        node.register_hook(lambda *_: _raise_without_order(False))
    return attended


def _raise_without_order(raises: bool) -> None:
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=not raises)
