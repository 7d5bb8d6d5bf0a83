"""Attention for packs and for decoding, given to transformers' models as an attention implementation of their own.

A model loaded with `attn_implementation=NAME` calls `attend` in each layer with its queries, keys and values; what
these may look at comes with the call as `layout=`, an object with a method `attend`. So every architecture that
transformers can run with another attention works, and all else of it stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from grpo.errors import InputError
from grpo.model.cpu import kernels
from grpo.model.packed.autograd import call

NAME = "r1flow"


class Layout(Protocol):
    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Queries [N, H, D], keys and values [N, Hkv, D] of the call's tokens to outputs [N, H, D]."""


def attend(
    module: Any,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, Hkv, N, D]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls. Returns [1, N, H, D]."""
    if layout is None:
        raise RuntimeError(
            "this model attends by layout only: call it through grpo.model.packed.logprobs or grpo.generation.sampler"
        )
    if sliding_window is not None and layout.longest > sliding_window:
        raise InputError(
            f"sequences of {layout.longest} tokens: the model looks back at {sliding_window} only (sliding window), "
            "which is not supported; take shorter sequences or another model"
        )
    if softcap is not None or s_aux is not None:
        raise InputError("the model caps its attention scores or has attention sinks, which is not supported")
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return layout.attend(module.layer_idx, q, k, v, scaling)[None], None


AttentionInterface.register(NAME, attend)


def hidden_states(trunk: Any, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """[N, hidden size] of a transformer without its head, for tokens [1, N] at positions [1, N]."""
    if trunk.config._attn_implementation != NAME:  # any other would ignore the layout without a word
        raise RuntimeError(f"load the model with attn_implementation={NAME!r}, or call set_attn_implementation on it")
    return trunk(input_ids=ids, position_ids=positions, use_cache=False, layout=layout).last_hidden_state[0]


@dataclass(frozen=True)
class Rows:
    """R sequences of one call, or what follows the prompts that they share with others."""

    places: Tensor  # [R, L]: where their tokens lie in the pack
    lengths: Tensor  # [R]: tokens of each, L or less; past them places may point anywhere
    before: Tensor  # [R, P]: where the tokens of the shared prompts lie

    @property
    def seen(self) -> Tensor:
        """[R, P + L]: where lies what they look at."""
        return torch.cat([self.before, self.places], 1)

    @property
    def real(self) -> Tensor:
        """[R, L]: what is no padding."""
        return torch.arange(self.places.shape[1], device=self.places.device) < self.lengths[:, None]


class Packed:
    """What the tokens of a pack look at: their own sequence up to themselves, its shared prompt included.

    Queries, keys and values are taken to slots, call after call: a prompt's keys and values to those of each sequence
    that follows it. A token's output is in one slot; a prompt has others where several calls ask for it.
    """

    def __init__(self, calls: list[Rows], tokens: int):
        self.calls = [rows for rows in calls if rows.places.numel()]
        self.longest = max(rows.places.shape[1] + rows.before.shape[1] for rows in self.calls)
        self.queries, self.keys = _Queries(self.calls, tokens), _Keys(self.calls, tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        queries = call(_Taken, q, self.queries).split([rows.places.numel() for rows in self.calls])
        sizes = [len(rows.places) * (rows.before.shape[1] + rows.places.shape[1]) for rows in self.calls]
        keys, values = (call(_Taken, states, self.keys).split(sizes) for states in (k, v))
        outputs: list[Tensor] = []
        for rows, *taken in zip(self.calls, queries, keys, values, strict=True):
            count = len(rows.places)
            asked, seen, found = (x.view(count, -1, *x.shape[1:]).transpose(1, 2) for x in taken)
            outputs.append(_causal(asked, seen, found, scale).transpose(1, 2).reshape(-1, *q.shape[1:]))
        return call(_PutBack, torch.cat(outputs), self.queries)


class _Queries:
    """Slots of queries and outputs."""

    def __init__(self, calls: list[Rows], tokens: int):
        self.places = torch.cat([rows.places.flatten() for rows in calls])  # [S]: of which token
        filled = torch.cat([rows.real.flatten() for rows in calls]).nonzero().squeeze(1)
        self.order = self.places.new_empty(tokens)  # [N]: the slot of each token's output
        self.order[self.places[filled]] = filled
        elsewhere = self.order[self.places] != torch.arange(len(self.places), device=self.places.device)
        self.unread = elsewhere.nonzero().squeeze(1)  # slots of no output that is read

    def total(self, gradient: Tensor) -> Tensor:
        """What the slots' gradients [S, H, D] are together for each token, [N, H, D]: those of unread slots are 0."""
        return gradient.index_select(0, self.order)

    def spread(self, gradient: Tensor) -> Tensor:
        """What the tokens' gradients [N, H, D] are for the slots of their outputs, [S, H, D]."""
        if kernels.supports(gradient):
            return kernels.sum_rows(gradient, *self._token_of)
        return gradient.index_select(0, self.places).index_fill_(0, self.unread, 0)

    @cached_property
    def _token_of(self) -> tuple[Tensor, Tensor]:
        """The tokens of slots that are read, and the end [S] of each slot's among them: it has one or none."""
        read = torch.ones(len(self.places), dtype=torch.bool).index_fill_(0, self.unread, False)
        return self.places[read], read.cumsum(0)


class _Keys:
    """Slots of keys and values."""

    def __init__(self, calls: list[Rows], tokens: int):
        self.calls, self.tokens = calls, tokens
        self.places = torch.cat([rows.seen.flatten() for rows in calls])  # [S]: of which token

    def total(self, gradient: Tensor) -> Tensor:
        """What the slots' gradients [S, H, D] are together for each token, [N, H, D]."""
        if kernels.supports(gradient):
            return kernels.sum_rows(gradient, *self._slots_of)
        return gradient.new_zeros(self.tokens, *gradient.shape[1:]).index_add_(0, self.places, gradient)

    @cached_property
    def _slots_of(self) -> tuple[Tensor, Tensor]:
        """Slots in the order of their tokens, and the end [N] of each token's among them. Padding is left out: it comes
        after all that counts, so that its gradient is 0."""
        real = torch.cat([pad(rows.real, (rows.before.shape[1], 0), value=True).flatten() for rows in self.calls])
        slots = real.nonzero().squeeze(1)
        places, order = self.places[slots].sort(stable=True)
        ends = torch.searchsorted(places, torch.arange(self.tokens), right=True)
        return slots[order], ends


class _Taken(torch.autograd.Function):
    """[N, H, D] to slots [S, H, D]."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, slots: _Queries | _Keys) -> Tensor:
        ctx.slots = slots
        return states.index_select(0, slots.places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.slots.total(gradient), None


class _PutBack(torch.autograd.Function):
    """Slots [S, H, D] to [N, H, D]."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, slots: _Queries) -> Tensor:
        ctx.slots = slots
        return outputs.index_select(0, slots.order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.slots.spread(gradient), None


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Each query looks at the keys up to its own, which is as far from the end as the query is."""
    mask: Any = causal_lower_right(q.shape[2], k.shape[2])
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
