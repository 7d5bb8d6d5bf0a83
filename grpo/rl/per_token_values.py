"""Per-token values of completions that a model computes without gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo.model.packed.packing import micro_batches

PerToken = Callable[[list[list[int]], list[list[int]]], Tensor]
"""(prompts, completions) -> one value per completion token, [B, C]."""


@torch.no_grad()
def measure(of: PerToken, prompts: list[list[int]], tokens: list[list[int]], micro_batch_tokens: int) -> list[Tensor]:
    """One value per completion token, [T] for each sequence, computed in micro-batches."""
    results: dict[int, Tensor] = {}
    units = [[i] for i in range(len(tokens))]
    # No activations are kept for a backward pass, so larger micro-batches fit; larger matrix products are faster.
    for batch in micro_batches(prompts, tokens, units, 4 * micro_batch_tokens):
        table = of([prompts[i] for i in batch], [tokens[i] for i in batch]).float().cpu()
        results |= {i: row[: len(tokens[i])].clone() for i, row in zip(batch, table, strict=True)}
    return [results[i] for i in range(len(tokens))]
