"""Re-exports for `grpo.generation`: parts of the CPU kernels, and copies to a device."""

from __future__ import annotations

from grpo.model.cpu.kernels import sample_tokens, supports
from grpo.model.cpu.prepacked_linear import is_worth_prepacking
from grpo.model.packed.transfer import to_device

__all__ = ["is_worth_prepacking", "sample_tokens", "supports", "to_device"]
