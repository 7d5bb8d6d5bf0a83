"""Attention over part of the keys, with the logsumexp needed to combine it with other parts."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo.model.packed.products import float32_bmm


def partial_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention outputs [n, H, L, D] over part of the keys, and the logsumexp of their scores [n, H, L], which is
    needed to combine the outputs of several parts."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    return attention_in_float32(q, k, v, mask, scale)


def attention_in_float32(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """`partial_attention` in plain PyTorch operations. Scores and softmax are float32 for any dtype of q and k, as in
    the trainer's attention, so that sampler and trainer agree."""
    scores = float32_bmm(q, k.transpose(-1, -2)).mul_(scale)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    return scores.sub_(lse[..., None]).exp_().to(v.dtype) @ v, lse
