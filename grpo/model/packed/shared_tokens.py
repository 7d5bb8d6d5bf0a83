"""Packs whose tokens several processes share (`hardware.sequence_parallel`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo.distributed.sequence_group import SequenceGroup
from grpo.model.packed.attention import Layout
from grpo.model.packed.scores import ScoreOptions

_GROUP: ContextVar[SequenceGroup | None] = ContextVar("sequence group", default=None)


@contextmanager
def sharing_tokens(group: SequenceGroup | None) -> Iterator[None]:
    """Context in which `grpo.model.logprobs` shares the tokens of its packs among the processes of a group, which must
    all make the same calls. None: each process has its own packs, whole."""
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)


def sequence_group() -> SequenceGroup | None:
    """The processes that share the tokens of a pack now."""
    return _GROUP.get()


@dataclass(frozen=True)
class SharedTokens:
    """Layout of one process's part of the tokens of a pack. Attention runs on all tokens, and one part of the heads."""

    layout: Layout
    group: SequenceGroup

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> Tensor:
        size, heads = self.group.size, q.shape[1]
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
