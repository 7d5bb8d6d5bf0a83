"""Rotary embeddings whose frequencies depend on the length of the sequence: `longrope` (Phi-3) and `dynamic` (NTK).

transformers uses the largest position of a call as the length, and `dynamic` also remembers the longest earlier call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def rope_limit(backbone: Any) -> int | None:
    """Length, in tokens, up to which a sequence has the same frequencies as every shorter one; None: any length."""
    limits = [limit for module, layer_type, kind in _changing(backbone) for limit in [_limit(module, layer_type, kind)]]
    return min(limits, default=None)


def reset_rope(backbone: Any) -> None:
    """Clears the remembered length of earlier calls."""
    for module, layer_type, kind in _changing(backbone):
        if kind == "longrope":
            continue
        prefix = "" if layer_type is None else f"{layer_type}_"
        first = getattr(module, f"{prefix}original_inv_freq")
        frequencies = getattr(module, f"{prefix}inv_freq")
        module.register_buffer(f"{prefix}inv_freq", first.to(frequencies.device), persistent=False)
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _changing(backbone: Any) -> Iterator[tuple[Any, str | None, str]]:
    """Rotary modules whose frequencies depend on the length: each with its layer type, if it serves several, and its
    kind."""
    for module in backbone.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(module, torch.nn.Module) and kinds is not None:
            by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
            for layer_type, kind in by_layer.items():
                if kind == "longrope" or "dynamic" in str(kind):
                    yield module, layer_type, str(kind)


def _limit(module: Any, layer_type: str | None, kind: str) -> int:
    parameters = module.config.rope_parameters
    own = parameters if layer_type is None else parameters[layer_type]
    return int(own["original_max_position_embeddings"] if kind == "longrope" else module.original_max_seq_len)
