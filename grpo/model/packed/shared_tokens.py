"""Packs whose tokens several processes share (`hardware.sequence_parallel`, `hardware.tensor_parallel`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo.distributed.sequence_group import SequenceGroup
from grpo.model.packed.attention import Packed
from grpo.model.packed.scores import ScoreOptions


@dataclass(frozen=True)
class SharedTokens:
    """Layout of one process's part of the tokens of a pack. Attention runs on all tokens, and one part of the heads.
    Divided layers call it with those already."""

    layout: Packed
    group: SequenceGroup

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> Tensor:
        size, heads = self.group.size, q.shape[1]
        if len(q) == self.layout.tokens:
            return self.layout.attend(layer, q, k, v, options)
        if k.shape[1] % size:  # fewer key heads than processes: each gets those of its queries
            k, v = (states.repeat_interleave(heads // states.shape[1], 1) for states in (k, v))
        if options.sinks is not None:
            options = replace(options, sinks=options.sinks.chunk(size)[self.group.rank])
        # One exchange for all three: blocks of a process's query, key and value heads.
        parts = [states.unflatten(1, (size, -1)) for states in (q, k, v)]
        exchanged = self.group.heads_of_all_tokens(torch.cat(parts, 2).flatten(1, 2))
        q, k, v = exchanged.split([part.shape[2] for part in parts], 1)
        attended = self.layout.attend(layer, q, k, v, options)
        return self.group.tokens_of_all_heads(attended)
