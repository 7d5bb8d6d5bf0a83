"""Attention of decoding on a GPU: the same operations on CPU tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo.model.decode.partial_attention import attention_in_float32, partial_attention


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [2, 3, 4, 16], k and v [2, 3, 9, 16], and a mask that hides the last three keys of the second row."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, generator=random).to(dtype) for n in (4, 9, 9))
    mask = torch.zeros(2, 1, 1, 9)
    mask[1, ..., 6:] = -torch.inf
    return q * 3, k, v, mask.to(dtype)


def by_definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = q.double() @ k.double().transpose(-1, -2) * scale + mask.double()
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_and_their_softmax_are_in_float32(dtype: torch.dtype) -> None:
    q, k, v, mask = inputs(dtype)
    output, lse = attention_in_float32(q, k, v, mask, 0.25)
    expected, expected_lse = by_definition(q, k, v, mask, 0.25)
    assert (output.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-6)  # in bfloat16 it would be off by 1e-2
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-6 if dtype == torch.float32 else 1e-2)


def test_it_equals_the_operation_that_a_cpu_has() -> None:
    q, k, v, mask = inputs(torch.float32)
    for found, expected in zip(
        attention_in_float32(q, k, v, mask, 0.25),
        partial_attention(q, k, v, mask, 0.25),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)
