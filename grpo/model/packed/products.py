"""Matrix products of bfloat16 and float16 tensors with sums and results in float32.

In bfloat16 a logit of 16 to 32 is rounded to a multiple of 1/8. Sampler and trainer round different sums. That alone
makes their log-probabilities differ by some 0.03 nats per token (MiniMax-M1, arXiv 2506.13585: a head in float32).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from grpo.model.cpu.limits import KEPT

NARROW = (torch.bfloat16, torch.float16)
WIDENED = 2**24
"""Number of weights held in float32 at once if a device has no product of narrow inputs with a float32 result."""


class Widened(NamedTuple):
    """A float32 copy of weights, and the dtype of the weights."""

    copy: Tensor
    dtype: torch.dtype


def float32_linear(x: Tensor, weight: Tensor | Widened, bias: Tensor | None) -> Tensor:
    """x W^T + b, [N, V], for x [N, H] and W [V, H]; the result is float32 if they are narrower."""
    if isinstance(weight, Widened):
        with _multiplying_as_bfloat16(x) if x.dtype == weight.dtype else nullcontext():
            return linear(x.float(), weight.copy, None if bias is None else bias.float())
    if weight.dtype == torch.float32 and x.dtype in NARROW:
        return linear(x.float(), weight, None if bias is None else bias.float())
    if weight.dtype not in NARROW or x.dtype != weight.dtype:
        return linear(x, weight, bias)
    wide_bias = None if bias is None else bias.float()
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        with _multiplying_as_bfloat16(x):
            return linear(x.float(), weight.float(), wide_bias)
    if x.is_cuda:
        product = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return product if wide_bias is None else product.add_(wide_bias)
    wide, product = x.float(), x.new_empty(len(x), len(weight), dtype=torch.float32)
    rows = max(1, WIDENED // weight.shape[1])
    with _multiplying_as_bfloat16(x):
        for part, columns in zip(weight.split(rows), product.split(rows, 1), strict=True):
            columns.copy_(wide @ part.float().t())
    return product if wide_bias is None else product.add_(wide_bias)


_threads_beside = 0
"""Threads that compute beside the one that trains."""


def compute_beside(threads: int) -> None:
    """Tells that so many more threads compute beside the one that trains, or that they no longer do (negative)."""
    global _threads_beside
    _threads_beside += threads


@contextmanager
def _multiplying_as_bfloat16(x: Tensor) -> Iterator[None]:
    """Context in which a CPU may multiply float32 copies of bfloat16 tensors as bfloat16, if x is one. Units for that
    (AMX) are four times as fast; products are exact, and sums stay float32.

    torch's switch for it is the process's: beside other threads, whose float32 numbers need more bits, it stays as it
    is.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or _threads_beside:
        yield
        return
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # an attribute of a module made at run time
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def kept_in_float32(weight: Tensor) -> Tensor | Widened:
    """What to pass to `float32_linear` again and again while the weights stay as they are: on a CPU a float32 copy,
    unless it is too large. Widening the weights for every token takes longer than the product."""
    if weight.is_cuda or weight.is_meta or weight.dtype not in NARROW or weight.numel() > KEPT:
        return weight
    return Widened(weight.detach().float(), weight.dtype)


def float32_bmm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, [n, H, L, T], in float32, for [n, H, L, D] and [n, H, D, T]."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return a.float() @ b.float()
    product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
    return product.view(*a.shape[:-1], b.shape[-1])
