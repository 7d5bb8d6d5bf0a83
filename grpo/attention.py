"""Attention for packs and for decoding, given to transformers' models as an attention implementation of their own.

A model loaded with `attn_implementation=NAME` calls `attend` in each layer with its queries, keys and values; what
these may look at comes with the call as `layout=`, an object with a method `attend`. So every architecture that
transformers can run with another attention works, and all else of it stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from grpo.errors import InputError
from grpo.fused import call

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
        raise RuntimeError("this model attends by layout only: call it through grpo.logprobs or grpo.rollout")
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
class Bucket:
    """R sequences of one call: what follows shared prompts of P tokens, or whole sequences (`prompts` is None)."""

    prompts: Tensor | None  # [g, P]: where their tokens lie in the pack
    rows: Tensor  # [R, L]: where the sequences' tokens lie
    of: Tensor  # [R]: which of the g prompts each follows
    lengths: Tensor  # [R]: tokens of each, L or less


class Packed:
    """What the tokens of a pack look at: their own sequence up to themselves, its shared prompt included.

    Queries, keys and values are taken to slots, bucket after bucket. A token's output is in one slot; a prompt has
    others where sequences of several buckets follow it.
    """

    def __init__(self, buckets: list[Bucket], tokens: int, device: torch.device):
        self.buckets = buckets
        self.longest = max(b.rows.shape[1] + (0 if b.prompts is None else b.prompts.shape[1]) for b in buckets)
        parts: list[Tensor] = []
        real: list[Tensor] = []
        for bucket in buckets:
            if bucket.prompts is not None:
                parts.append(bucket.prompts)
                real.append(torch.ones_like(bucket.prompts, dtype=torch.bool))
            parts.append(bucket.rows)
            real.append(torch.arange(bucket.rows.shape[1], device=device) < bucket.lengths[:, None])
        self.sizes = [part.numel() for part in parts]
        places = torch.cat([part.flatten() for part in parts])
        filled = torch.cat([part.flatten() for part in real])
        order = torch.empty(tokens, dtype=torch.long, device=device)
        order[places[filled]] = filled.nonzero().squeeze(1)
        others = order[places] != torch.arange(len(places), device=device)
        again = (others & filled).nonzero().squeeze(1)
        self.slots = _Slots(places, order, others.nonzero().squeeze(1), again if len(again) else None)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        parts = zip(*(call(_Taken, states, self.slots).split(self.sizes) for states in (q, k, v)), strict=True)
        outputs: list[Tensor] = []
        for bucket in self.buckets:
            if bucket.prompts is not None:
                asked, prompt_keys, prompt_values = (_rows(states, bucket.prompts) for states in next(parts))
                outputs.append(_causal(asked, prompt_keys, prompt_values, scale))
            queries, keys, values = (_rows(states, bucket.rows) for states in next(parts))
            if bucket.prompts is not None:
                keys = torch.cat([prompt_keys.index_select(0, bucket.of), keys], 2)
                values = torch.cat([prompt_values.index_select(0, bucket.of), values], 2)
            if bucket.rows.numel():
                outputs.append(_causal(queries, keys, values, scale))
        flat = torch.cat([o.transpose(1, 2).reshape(-1, *q.shape[1:]) for o in outputs])
        return call(_PutBack, flat, self.slots)


class _Slots(NamedTuple):
    places: Tensor  # [S]: of which token
    order: Tensor  # [N]: the slot of each token's output
    others: Tensor  # slots of no output that is read
    again: Tensor | None  # those of them that other tokens look at: a prompt's in further buckets


class _Taken(torch.autograd.Function):
    """[N, H, D] to slots [S, H, D]. Padding comes after all that counts: its gradient is 0 and need not be added."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, slots: _Slots) -> Tensor:
        ctx.slots = slots
        return states.index_select(0, slots.places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        slots, total = ctx.slots, gradient.index_select(0, ctx.slots.order)
        if slots.again is not None:
            total.index_add_(0, slots.places[slots.again], gradient[slots.again])
        return total, None


class _PutBack(torch.autograd.Function):
    """Slots [S, H, D] to [N, H, D]."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, slots: _Slots) -> Tensor:
        ctx.slots = slots
        return outputs.index_select(0, slots.order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.slots.places).index_fill_(0, ctx.slots.others, 0), None


def _rows(states: Tensor, places: Tensor) -> Tensor:
    """Slots of a part [R * L, H, D] to [R, H, L, D]."""
    return states.view(*places.shape, *states.shape[1:]).transpose(1, 2)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Each query looks at the keys up to its own, which is as far from the end as the query is."""
    mask: Any = causal_lower_right(q.shape[2], k.shape[2])
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
