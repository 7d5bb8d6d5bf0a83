"""Attention over packs and key-value caches, registered with transformers as an attention implementation.

A model loaded with `attn_implementation=NAME` calls `attend` in every layer with its queries, keys and values. The
argument `layout=`, an object with a method `attend`, says which sequence each token belongs to. What the layer does to
its scores (scale, window, softcap, sinks) comes from the model itself, as `ScoreOptions`. So this works for every
architecture that transformers can run with a custom attention, and the rest of the model is unchanged.

`UNFUSED` does the same using only PyTorch's own operations and autograd (`hardware.fused = false`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sliding_window_causal_mask_function

from grpo.distributed.threads import use_all_threads
from grpo.errors import InputError
from grpo.model.cpu import kernels
from grpo.model.packed.autograd import call
from grpo.model.packed.current import current_layout, running
from grpo.model.packed.flex import FlexPack, is_chosen
from grpo.model.packed.scores import ScoreOptions, VisibleTokens, causal_attention, window_of
from grpo.model.packed.transfer import to_device

NAME = "r1flow"
UNFUSED = "r1flow-unfused"
POSITIONS = ("position_ids", "cache_position", "position_embeddings")
"""Arguments that models pass along and that do not affect scores."""


class Layout(Protocol):
    """The tokens of one forward pass and the sequences that they belong to."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> Tensor:
        """Attention outputs [N, H, D] for the queries [N, H, D], keys and values [N, Hkv, D] of the N tokens."""


def attend(
    module: Any,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, Hkv, N, D]
    value: Tensor,  # [1, Hkv, N, Dv]
    attention_mask: VisibleTokens | Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention implementation registered with transformers. Returns [1, N, H, Dv]."""
    layout = current_layout() if layout is None else layout
    if layout is None:
        raise RuntimeError(
            "this model attends by layout only: call it through grpo.model.logprobs or grpo.generation.sampler"
        )
    if isinstance(attention_mask, Tensor):
        raise InputError("the model makes a mask of its own")
    if unknown := [name for name, value in others.items() if isinstance(value, Tensor) and name not in POSITIONS]:
        raise InputError(f"the model's attention depends on something more: {', '.join(unknown)}")
    window = attention_mask
    if window is None and sliding_window is not None:
        window = VisibleTokens(sliding_window_causal_mask_function(sliding_window), sliding_window)
    width, value_width = query.shape[-1], value.shape[-1]
    options = ScoreOptions(scaling if scaling is not None else width**-0.5, window, softcap, s_aux)
    q, k, v = (_widened(states[0].transpose(0, 1), max(width, value_width)) for states in (query, key, value))
    return layout.attend(module.layer_idx, q, k, v, options)[None, ..., :value_width], None


def _widened(states: Tensor, width: int) -> Tensor:
    """Pads heads [..., D] with zeros to `width`. The kernels need values as wide as keys, and latent attention has
    narrower values. The zeros change neither the scores nor the outputs that are kept."""
    return states if states.shape[-1] == width else pad(states, (0, width - states.shape[-1]))


for name in (NAME, UNFUSED):
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, window_of)


def is_packed(backbone: Any) -> bool:
    """Whether a model attends through a layout."""
    return backbone.config._attn_implementation in (NAME, UNFUSED)


def is_unfused(backbone: Any) -> bool:
    """Whether a model was loaded with `hardware.fused = false`."""
    return bool(backbone.config._attn_implementation == UNFUSED)


def hidden_states(backbone: Any, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """Last hidden states [N, hidden size] of a transformer without its head, for tokens [1, N] at positions [1, N]."""
    if not is_packed(backbone):  # any other would silently ignore the layout
        raise RuntimeError(f"load the model with attn_implementation={NAME!r}, or call set_attn_implementation on it")
    use_all_threads(ids.device)
    with running(layout, positions[0]):
        states: Tensor = backbone(use_cache=False, **packed_inputs(ids, positions, layout)).last_hidden_state[0]
    return states


def packed_inputs(ids: Tensor, positions: Tensor, layout: Layout) -> dict[str, Any]:
    """Arguments of a backbone's forward pass over a pack."""
    # Without a mask transformers would infer sequences from the positions and mask by index in the pack.
    return dict(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), layout=layout)


@dataclass(frozen=True)
class Rows:
    """R sequences of one attention call; if they share prompts, only their tokens after the prompt. On the host."""

    places: Tensor  # [R, L]: index of each token in the pack
    lengths: Tensor  # [R]: number of tokens, at most L; later entries of `places` are arbitrary
    before: Tensor  # [R, P]: index of each token of the shared prompts

    @property
    def seen(self) -> Tensor:
        """Index of each key, [R, P + L]: the shared prompt first, then the row's own tokens."""
        return torch.cat([self.before, self.places], 1)

    @property
    def real(self) -> Tensor:
        """Mask of the tokens that are not padding, [R, L]."""
        return torch.arange(self.places.shape[1]) < self.lengths[:, None]


class Packed:
    """Layout of a pack: each token sees its own sequence up to itself, including the shared prompt.

    Queries, keys and values are gathered into slots, one attention call after the other. A shared prompt's keys and
    values have slots in each sequence that follows it. Each token's output is read from one slot only, so a prompt in
    several calls has query slots that are never read.
    """

    def __init__(self, calls: list[Rows], tokens: int, device: torch.device, unfused: bool = False):
        """`calls`: on the host, because planning on a GPU would require waiting for it. `tokens`: length of the pack.
        `device`: of the model. `unfused`: use no kernels, and autograd's own backward passes."""
        self.calls = [rows for rows in calls if rows.places.numel()]
        self.longest = max(rows.places.shape[1] + rows.before.shape[1] for rows in self.calls)
        self.queries, self.keys = _Queries(self.calls, tokens, device), _Keys(self.calls, tokens, device)
        self.tokens, self.device, self.unfused = tokens, device, unfused

    @cached_property
    def rows(self) -> list[Tensor]:
        """For each call, the token indices of its whole sequences, [R, L], padded on the right."""
        return [to_device(rows.seen, self.device) for rows in self.calls]

    @cached_property
    def slot_in_rows(self) -> Tensor:
        """Index of each token's output in the flattened `rows`, [N]; for a shared prompt's tokens, in a row of the
        prompt alone."""
        slots = [pad(rows.real, (rows.before.shape[1], 0), value=False).flatten() for rows in self.calls]
        filled = torch.cat(slots).nonzero().squeeze(1)
        places = torch.cat([rows.seen.flatten() for rows in self.calls])[filled]
        return to_device(_last_of_each(places, filled, self.tokens), self.device)

    @cached_property
    def flex(self) -> FlexPack:
        return FlexPack(self.calls, self.tokens, self.longest, self.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> Tensor:
        if is_chosen():
            return self.flex.attend(q, k, v, options)
        query_slots = self._gather(q, self.queries).split([rows.places.numel() for rows in self.calls])
        sizes = [len(rows.places) * (rows.before.shape[1] + rows.places.shape[1]) for rows in self.calls]
        key_slots, value_slots = (self._gather(states, self.keys).split(sizes) for states in (k, v))
        outputs: list[Tensor] = []
        for rows, *gathered in zip(self.calls, query_slots, key_slots, value_slots, strict=True):
            count = len(rows.places)
            queries, keys, values = (x.view(count, -1, *x.shape[1:]).transpose(1, 2) for x in gathered)
            attended = causal_attention(queries, keys, values, options, self.longest)
            outputs.append(attended.transpose(1, 2).reshape(-1, *q.shape[1:]))
        slots = torch.cat(outputs)
        return slots.index_select(0, self.queries.order) if self.unfused else call(_Scatter, slots, self.queries)

    def _gather(self, states: Tensor, slots: _Queries | _Keys) -> Tensor:
        return states.index_select(0, slots.places) if self.unfused else call(_Gather, states, slots)


def _last_of_each(tokens: Tensor, slots: Tensor, count: int) -> Tensor:
    """The last slot of each of `count` tokens, for the token of each slot; slots ascend. Assigning by index would take
    any of a token's slots if several threads do it, and sums would be rounded in another order."""
    return slots.new_zeros(count).scatter_reduce_(0, tokens, slots, "amax")


class _Queries:
    """Slots of queries and outputs."""

    def __init__(self, calls: list[Rows], tokens: int, device: torch.device):
        places = torch.cat([rows.places.flatten() for rows in calls])
        filled = torch.cat([rows.real.flatten() for rows in calls]).nonzero().squeeze(1)
        order = _last_of_each(places[filled], filled, tokens)
        unread = (order[places] != torch.arange(len(places))).nonzero().squeeze(1)
        self.places = to_device(places, device)  # [S]: token of each slot
        self.order = to_device(order, device)  # [N]: slot of each token's output
        self.unread = to_device(unread, device)  # slots whose output is never read

    def sum_gradients(self, gradient: Tensor) -> Tensor:
        """Gradients of the tokens' queries [N, H, D] from those of the slots [S, H, D]; unread slots contribute
        none."""
        return gradient.index_select(0, self.order)

    def spread_gradients(self, gradient: Tensor) -> Tensor:
        """Gradients of the slots' outputs [S, H, D] from those of the tokens [N, H, D]; 0 for unread slots."""
        if kernels.supports(gradient):
            return kernels.sum_rows(gradient, *self._token_of)
        return gradient.index_select(0, self.places).index_fill_(0, self.unread, 0)

    @cached_property
    def _token_of(self) -> tuple[Tensor, Tensor]:
        """Tokens of the slots that are read, and each slot's end index among them, [S]; a slot has one token or
        none."""
        read = torch.ones(len(self.places), dtype=torch.bool).index_fill_(0, self.unread, False)
        return self.places[read], read.cumsum(0)


class _Keys:
    """Slots of keys and values."""

    def __init__(self, calls: list[Rows], tokens: int, device: torch.device):
        self.calls, self.tokens = calls, tokens
        self._on_host = torch.cat([rows.seen.flatten() for rows in calls])
        self.places = to_device(self._on_host, device)  # [S]: token of each slot

    def sum_gradients(self, gradient: Tensor) -> Tensor:
        """Gradients of the tokens' keys or values [N, H, D]: the sums over their slots [S, H, D]."""
        if kernels.supports(gradient):
            return kernels.sum_rows(gradient, *self._slots_of)
        sums = gradient.new_empty(self.tokens, *gradient.shape[1:])
        for tokens, slots in self._slots_by_count:
            sums.index_copy_(0, tokens, gradient.index_select(0, slots.flatten()).unflatten(0, slots.shape).sum(1))
        return sums

    @cached_property
    def _slots_by_count(self) -> list[tuple[Tensor, Tensor]]:
        """For each number c of slots per token: the tokens [T] and their slots [T, c]. Sums over these have a fixed
        order; `index_add_` on a GPU has none."""
        slots, ends = self._slots_of
        counts = ends.diff(prepend=ends.new_zeros(1))
        groups = []
        for count in counts.unique().tolist():
            tokens = (counts == count).nonzero().squeeze(1)
            places = slots[(ends[tokens] - count)[:, None] + torch.arange(count)]
            groups.append((to_device(tokens, self.places.device), to_device(places, self.places.device)))
        return groups

    @cached_property
    def _slots_of(self) -> tuple[Tensor, Tensor]:
        """Slots ordered by token, and the end index of each token's slots, [N]. Padding is omitted: no query sees it,
        so its gradient is 0."""
        real = torch.cat([pad(rows.real, (rows.before.shape[1], 0), value=True).flatten() for rows in self.calls])
        slots = real.nonzero().squeeze(1)
        places, order = self._on_host[slots].sort(stable=True)
        ends = torch.searchsorted(places, torch.arange(self.tokens), right=True)
        return slots[order], ends


class _Gather(torch.autograd.Function):
    """Gathers tokens [N, H, D] into slots [S, H, D]."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, slots: _Queries | _Keys) -> Tensor:
        ctx.slots = slots
        return states.index_select(0, slots.places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.slots.sum_gradients(gradient), None


class _Scatter(torch.autograd.Function):
    """Scatters slots [S, H, D] to tokens [N, H, D]."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, slots: _Queries) -> Tensor:
        ctx.slots = slots
        return outputs.index_select(0, slots.order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.slots.spread_gradients(gradient), None
