"""Attention of bfloat16 tensors on a CPU."""

from __future__ import annotations

import torch

from grpo.model.packed.scores import ScoreOptions, causal_attention


def test_narrow_attention_is_that_of_float32_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 8)
    narrow = [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    outputs = [causal_attention(*inputs, ScoreOptions(0.3), longest=5) for inputs in (narrow, wide)]
    assert outputs[0].dtype == torch.bfloat16 and outputs[0].equal(outputs[1].bfloat16())
    outputs[0].sum().backward()
    outputs[1].sum().backward()
    for x, exact in zip(narrow, wide, strict=True):
        assert x.grad is not None and exact.grad is not None and x.grad.equal(exact.grad.bfloat16())
