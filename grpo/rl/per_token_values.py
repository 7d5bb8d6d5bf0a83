"""Per-token values of completions that a model computes without gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo.distributed.process_group import Parallel
from grpo.model.packed.packing import micro_batches

PerToken = Callable[[list[list[int]], list[list[int]]], Tensor]
"""(prompts, completions) -> one value per completion token, [B, C]."""


FILLER = ([[0]], [[0]])
"""A prompt and a completion for a process that has none."""


@torch.no_grad()
def measure(
    of: PerToken, prompts: list[list[int]], tokens: list[list[int]], micro_batch_tokens: int, parallel: Parallel
) -> list[Tensor]:
    """One value per completion token, [T] for each sequence, computed in micro-batches.

    All processes must call it. They call `of` equally often, because a sharded model gathers weights for each call.
    """
    units = [[i] for i in range(len(tokens))]
    # No activations are kept for a backward pass, so larger micro-batches fit; larger matrix products are faster.
    batches = micro_batches(prompts, tokens, units, 4 * micro_batch_tokens)
    pairs = [([prompts[i] for i in batch], [tokens[i] for i in batch]) for batch in batches]
    tables = parallel.map_together(lambda pair: of(*pair).float().cpu(), pairs, FILLER)
    rows = {i: row for batch, table in zip(batches, tables, strict=True) for i, row in zip(batch, table, strict=True)}
    return [rows[i][: len(tokens[i])].clone() for i in range(len(tokens))]
