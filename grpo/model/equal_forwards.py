"""Equal numbers of forward passes on all processes, because each pass of a sharded model gathers weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule


def run_forwards(backbone: Any, forwards: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """Returns the results of `forwards`, each one forward pass of `backbone`.

    If the blocks are sharded, a process with fewer passes repeats its last one and adds it to the first result with
    weight zero, so that its backward pass runs too.
    """
    extra = _most(backbone, len(forwards)) - len(forwards)
    results = [forward() for forward in forwards]
    for _ in range(extra):
        results[0] = results[0] + 0 * forwards[-1]().sum()
    return results


def _most(backbone: Any, count: int) -> int:
    """The largest count over all processes that share the backbone. Must be agreed on before the first pass, which
    waits for the other processes to gather weights."""
    if not any(isinstance(module, FSDPModule) for module in backbone.modules()):
        return count
    counts = torch.tensor(count, device=next(backbone.parameters()).device)
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    return int(counts)
