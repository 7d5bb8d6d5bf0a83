"""Processes that share the tokens of their sequences, and what they exchange.

Each process of a group has one part of the tokens, and runs everything but attention on it. For attention, tokens are
exchanged for heads: each process gets one part of the heads, of all tokens (Ulysses, arXiv 2309.14509). Layers whose
weights are divided (`grpo.distributed.divided_layers`) get all tokens, and sum their outputs into parts (Megatron,
arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SequenceGroup:
    """Process `rank` of the `size` processes that share the tokens of each micro-batch."""

    rank: int
    size: int
    group: dist.ProcessGroup
    divides_layers: bool = False
    """Whether they also divide weights of layers (`hardware.tensor_parallel`)."""

    def part(self, tokens: int) -> slice:
        """This process's part of `tokens`, which must be a multiple of `size`."""
        share = tokens // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def heads_of_all_tokens(self, states: Tensor) -> Tensor:
        """[N / size, H, D] -> [N, H / size, D]: all heads of this process's tokens for all tokens of its heads."""
        exchanged: Tensor = _Exchange.apply(states, self, True)
        return exchanged

    def tokens_of_all_heads(self, states: Tensor) -> Tensor:
        """[N, H / size, D] -> [N / size, H, D]: the reverse of `heads_of_all_tokens`."""
        exchanged: Tensor = _Exchange.apply(states, self, False)
        return exchanged

    def sum(self, part: Tensor) -> Tensor:
        """The sum of the processes' tensors, from which all of them must compute the same loss. Each process gets the
        gradient of its own term, so gradients must be summed over the group."""
        total: Tensor = _Sum.apply(part, self)
        return total

    def all_tokens(self, part: Tensor, dim: int) -> Tensor:
        """All tokens, along `dim`, from this process's part of them. Each process gets the gradient of its part: the
        sum over the processes."""
        whole: Tensor = _Collect.apply(part, self, dim, True)
        return whole

    def sum_of_part(self, whole: Tensor, dim: int) -> Tensor:
        """This process's part of the tokens, along `dim`, in the sum of the processes' tensors."""
        part: Tensor = _Collect.apply(whole, self, dim, False)
        return part

    def collect(self, sent: Tensor, dim: int, gathers: bool) -> Tensor:
        before, (tokens, *after) = sent.shape[:dim], sent.shape[dim:]
        if before.numel() != 1:
            raise RuntimeError(f"several packs at once: {tuple(sent.shape)}")  # their tokens would be mixed
        received = sent.new_empty(*before, tokens * self.size if gathers else tokens // self.size, *after)
        collective = dist.all_gather_into_tensor if gathers else dist.reduce_scatter_tensor
        collective(received.view(-1), sent.contiguous().view(-1), group=self.group)
        return received

    def exchange(self, states: Tensor, to_heads: bool) -> Tensor:
        size = self.size
        sent = states.unflatten(1, (size, -1)).transpose(0, 1) if to_heads else states.unflatten(0, (size, -1))
        received = torch.empty_like(sent, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        return received.flatten(0, 1) if to_heads else received.transpose(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: SequenceGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return group.exchange(states, to_heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.exchange(gradient, not ctx.to_heads), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: SequenceGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group.group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Collect(torch.autograd.Function):
    """Gathers all tokens, or sums those of this process's part: each is the other's backward pass."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: SequenceGroup, dim: int, gathers: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.gathers = group, dim, gathers
        return group.collect(states, dim, gathers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.collect(gradient, ctx.dim, not ctx.gathers), None, None, None


_SHARING: ContextVar[SequenceGroup | None] = ContextVar("sequence group", default=None)


@contextmanager
def sharing_tokens(group: SequenceGroup | None) -> Iterator[None]:
    """Context in which `grpo.model.logprobs` shares the tokens of its packs among the processes of a group, which must
    all make the same calls. None: each process has its own packs, whole."""
    token = _SHARING.set(group)
    try:
        yield
    finally:
        _SHARING.reset(token)


def sequence_group() -> SequenceGroup | None:
    """The processes that share the tokens of a pack now."""
    return _SHARING.get()
