"""Attention to a part of the keys, with what combining it with other parts takes."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo.model.packed.products import float32_bmm


def partial_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention outputs [n, H, L, D] over a part of the keys, and the logsumexp of their scores [n, H, L], with which
    outputs over several parts are combined."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    return attention_in_float32(q, k, v, mask, scale)


def attention_in_float32(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """`partial_attention` by PyTorch's own operations: scores and softmax in float32 whatever the type of q and k, as
    the trainer's attention has them, so that sampler and trainer agree."""
    scores = float32_bmm(q, k.transpose(-1, -2)).mul_(scale)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    return scores.sub_(lse[..., None]).exp_().to(v.dtype) @ v, lse
