"""Per-token values of completions that a model computes without gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo.distributed.process_group import Parallel
from grpo.model.packed.packing import micro_batches

PerToken = Callable[[list[list[int]], list[list[int]]], Tensor]
"""(prompts, completions) -> one value per completion token, [B, C]."""


FILLER = ([0], [0])
"""A prompt and a completion for a process that has none."""


@torch.no_grad()
def measure(
    of: PerToken, prompts: list[list[int]], tokens: list[list[int]], micro_batch_tokens: int, parallel: Parallel
) -> list[Tensor]:
    """One value per completion token, [T] for each sequence, computed in micro-batches.

    All processes must call it. They call `of` equally often, because a sharded model gathers weights for each call.
    """
    results: dict[int, Tensor] = {}
    units = [[i] for i in range(len(tokens))]
    # No activations are kept for a backward pass, so larger micro-batches fit; larger matrix products are faster.
    batches = micro_batches(prompts, tokens, units, 4 * micro_batch_tokens)
    rounds = max(parallel.all_gather(len(batches)))  # agreed on before the first one, which waits for the others
    for batch in batches:
        table = of([prompts[i] for i in batch], [tokens[i] for i in batch]).float().cpu()
        results |= {i: row[: len(tokens[i])].clone() for i, row in zip(batch, table, strict=True)}
    for _ in range(rounds - len(batches)):
        of([FILLER[0]], [FILLER[1]])
    return [results[i] for i in range(len(tokens))]
