"""Products of few rows with the same weights on a CPU, again and again, as every step of a rollout has them.

Each reads all weights, so that their order in memory decides its time. MKL copies them into the order it wants, in
every product; here that is done once. It takes as long as some tens of products, and memory for the weights once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo.model.cpu.limits import MAX_ROWS, MIN_STEPS


def is_worth_prepacking(rows: int, steps: int) -> bool:
    return 1 < rows <= MAX_ROWS and steps >= MIN_STEPS and torch.backends.mkl.is_available()


class PrepackedLinear:
    """Float32 weights [out, in] on a CPU, one below the other, in the order for products of exactly `rows` rows."""

    def __init__(self, weights: Sequence[Tensor], rows: int, scratch: Tensor):
        """`scratch`: room for all numbers of the weights, needed for as long as this takes."""
        self.rows = rows
        joined = weights[0]
        if len(weights) > 1:
            shape = sum(map(len, weights)), joined.shape[1]
            joined = torch.cat([*weights], out=scratch[: shape[0] * shape[1]].view(shape))
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(joined, rows)
        self._shape = joined.new_empty(1, 1).expand(joined.shape)  # all that is read of the weights themselves

    def product(self, x: Tensor) -> Tensor:
        """x weights^T, [rows, out], for x [rows, in]."""
        return torch.ops.mkl._mkl_linear(x.contiguous(), self._packed, self._shape, None, self.rows)
