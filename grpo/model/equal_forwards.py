"""Forward passes of a model whose blocks are sharded: each gathers weights, so all processes must make equally many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule


def run_forwards(backbone: Any, forwards: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """The results of `forwards`, each one forward pass of `backbone`.

    Where its blocks are sharded, a process with fewer of them repeats its last, with zero weight in the first result so
    that its backward pass runs too.
    """
    extra = _most(backbone, len(forwards)) - len(forwards)
    results = [forward() for forward in forwards]
    for _ in range(extra):
        results[0] = results[0] + 0 * forwards[-1]().sum()
    return results


def _most(backbone: Any, count: int) -> int:
    """The largest count of all processes that share the backbone; agreed on before the first pass, whose gathering of
    weights would wait for the others."""
    if not any(isinstance(module, FSDPModule) for module in backbone.modules()):
        return count
    counts = torch.tensor(count, device=next(backbone.parameters()).device)
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    return int(counts)
