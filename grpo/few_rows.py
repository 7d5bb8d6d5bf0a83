"""Products of few rows with a model's weights on a CPU: every step of a rollout is made of them.

Each reads all weights, so that their order in memory decides its time. MKL copies them into the order it wants, in
every product; here that is done once a rollout (0.5 GB more for 135M weights in float32, as long as it lasts). Where
torch has no MKL, or for other types, products are as they were.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

MOST = 48
"""Rows up to which it pays; many more are limited by arithmetic."""


class FewRows:
    """A weight [out, in] in the order for products of `rows` rows."""

    def __init__(self, rows: int):
        self.rows = rows
        self._packed: Tensor | None = None

    def fits(self, rows: int) -> bool:
        """Fewer than half would take as long as all of them."""
        return self.rows < 2 * rows <= 2 * self.rows

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x weight^T, [n, out], for x [n, in]."""
        if self._packed is None:  # at first use: not every weight is read by this
            self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach(), self.rows)
        filled = x if len(x) == self.rows else pad(x, (0, 0, 0, self.rows - len(x)))
        return torch.ops.mkl._mkl_linear(filled.contiguous(), self._packed, weight, None, self.rows)[: len(x)]


@contextmanager
def few_rows(model: nn.Module, rows: int) -> Iterator[None]:
    """While it lasts, products of half of `rows` to `rows` rows with weights of `model` are faster; these must not
    change. Only `grpo.fused.product` knows of it."""
    weights: list[Any] = [p for p in model.parameters() if p.dim() == 2] if 1 < rows <= MOST and _can(model) else []
    for weight in weights:
        weight.few_rows = FewRows(rows)
    try:
        yield
    finally:
        for weight in weights:
            del weight.few_rows
        if weights:
            _give_back()


def _can(model: nn.Module) -> bool:
    weight = next(model.parameters())
    return torch.backends.mkl.is_available() and weight.device.type == "cpu" and weight.dtype == torch.float32


def _give_back() -> None:
    """glibc keeps freed memory, in pieces that what comes next may not fit into."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
