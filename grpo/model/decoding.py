"""The fused operations of decoding: what `grpo.generation` may use of the CPU kernels and fused blocks."""

from __future__ import annotations

from typing import Any

from grpo.model.cpu.kernels import decode_attention, sample_tokens, supports
from grpo.model.cpu.limits import INITIAL_CACHE_TOKENS
from grpo.model.cpu.prepacked_linear import is_worth_prepacking
from grpo.model.fused.decode_step import DecodeStep, can_decode

__all__ = [
    "INITIAL_CACHE_TOKENS",
    "DecodeStep",
    "decode_attention",
    "is_worth_prepacking",
    "make_decode_step",
    "sample_tokens",
    "supports",
]


def make_decode_step(backbone: Any, head: Any, prepacked_rows: int) -> DecodeStep | None:
    """The fused decoding step of a model, or None where the model needs transformers' own forward pass."""
    return DecodeStep(backbone, head, prepacked_rows) if can_decode(backbone, head) else None
