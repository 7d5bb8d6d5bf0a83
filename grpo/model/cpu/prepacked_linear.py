"""Linear layers with prepacked weights, for repeated products of few rows with the same weights on a CPU.

Such a product is limited by reading the weights, so their memory layout matters. MKL copies them into its own layout in
every call; here they are copied once. The copy takes as much time as some tens of products, and as much memory as the
weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo.model.cpu.limits import MAX_ROWS, MIN_STEPS


def is_worth_prepacking(rows: int, steps: int) -> bool:
    """Whether prepacking saves time over `steps` decoding steps of `rows` sequences. False if torch lacks MKL."""
    return 1 < rows <= MAX_ROWS and steps >= MIN_STEPS and torch.backends.mkl.is_available()


class PrepackedLinear:
    """Float32 weights [out, in] on a CPU, stacked and prepacked for products of exactly `rows` rows."""

    def __init__(self, weights: Sequence[Tensor], rows: int, scratch: Tensor):
        """`scratch`: a tensor with at least as many elements as the weights; can be reused afterwards."""
        self.rows = rows
        stacked = weights[0]
        if len(weights) > 1:
            shape = sum(map(len, weights)), stacked.shape[1]
            stacked = torch.cat([*weights], out=scratch[: shape[0] * shape[1]].view(shape))
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(stacked, rows)
        self._shape = stacked.new_empty(1, 1).expand(stacked.shape)  # MKL reads only the shape of the original weights

    def product(self, x: Tensor) -> Tensor:
        """x weights^T, [rows, out], for x [rows, in]."""
        output: Tensor = torch.ops.mkl._mkl_linear(x.contiguous(), self._packed, self._shape, None, self.rows)
        return output
