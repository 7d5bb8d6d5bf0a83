"""The fused operations of decoding: what `grpo.generation` may use of the CPU kernels."""

from __future__ import annotations

from grpo.model.cpu.kernels import sample_tokens, supports
from grpo.model.cpu.prepacked_linear import is_worth_prepacking

__all__ = ["is_worth_prepacking", "sample_tokens", "supports"]
