"""Batched decoding with key-value caches: one token a step for each of many sequences.

A group's prompt is cached once; each sequence has a cache of its own for the tokens it generated. Sequences that end
leave the batch at once, and waiting groups take their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo.model.cpu.kernels import decode_attention, supports
from grpo.model.cpu.limits import INITIAL_CACHE_TOKENS
from grpo.model.decode.partial_attention import partial_attention
from grpo.model.fused.decode_step import DecodeStep, can_decode
from grpo.model.head import Head, backbone_of
from grpo.model.packed.attention import Packed, hidden_states, is_unfused
from grpo.model.packed.packing import pack
from grpo.model.packed.scores import ScoreOptions, VisibleTokens, masked_attention
from grpo.model.rope import reset_rope


class Decoder:
    """The sequences in the batch: rows 0 to n - 1, in groups 0 to g - 1."""

    def __init__(self, model: Any, packed_rows: int = 0):
        """`packed_rows`: as `prepacked_rows` of `grpo.model.fused.decode_step.DecodeStep`."""
        self.backbone, self.head = backbone_of(model), Head(model)
        reset_rope(self.backbone)
        self.device = next(model.parameters()).device
        self.fused = not is_unfused(self.backbone)
        self._decode_step: DecodeStep | None = None
        if self.head.scale == 1 and can_decode(self.backbone, self.head.linear):
            self._decode_step = DecodeStep(self.backbone, self.head.linear, packed_rows)
        self.caches: dict[int, _Cache] = {}
        self.prompt_lengths: list[int] = []  # of the groups
        self.group_of: list[int] = []  # of the rows
        self.generated = torch.zeros(0, dtype=torch.long, device=self.device)  # tokens of each row so far
        self._batch: _Batch | None = None

    def add_groups(self, prompts: Sequence[Sequence[int]], size: int) -> Tensor:
        """Appends a group of `size` rows for each prompt. Returns the logits after each prompt, [g, V]."""
        packed = pack(prompts, [[] for _ in prompts], self.device, unfused=not self.fused)
        layout = _Prefill(packed.attention)
        hidden = hidden_states(self.backbone, packed.ids, packed.positions, layout)
        first, width = len(self.prompt_lengths), max(map(len, prompts))
        # Shorter prompts are padded with any token; it is masked.
        index = [
            [*range(end - len(prompt) + 1, end + 1), *([end] * (width - len(prompt)))]
            for prompt, end in zip(prompts, packed.last, strict=True)
        ]
        places = torch.tensor(index, device=self.device)
        self.prompt_lengths += map(len, prompts)
        self.group_of += [first + number for number in range(len(prompts)) for _ in range(size)]
        self.generated = torch.cat([self.generated, self.generated.new_zeros(len(prompts) * size)])
        for layer, (keys, values) in layout.kept.items():
            shared = keys[places].transpose(1, 2), values[places].transpose(1, 2)
            self.caches.setdefault(layer, _Cache(shared[0])).add_prompts(first, *shared)
        self._batch = None
        return self.head(hidden[torch.tensor(packed.last, device=self.device)])

    def step(self, tokens: Tensor) -> Tensor:
        """Appends a token to each row, [n]. Returns the logits of the next, [n, V]."""
        if self._batch is None:
            cache = next(iter(self.caches.values()))
            like = cache.rows[0]
            uses_kernel = self.fused and supports(like)
            self._batch = _Batch.of(self.prompt_lengths, self.group_of, self.generated, like.dtype, uses_kernel)
        self._batch.begin()
        ids, positions = tokens.to(self.device), self._batch.row_prompt_lengths + self.generated
        if self._decode_step is not None:
            logits = self._decode_step(ids, positions, self.attend)
        else:
            logits = self.head(hidden_states(self.backbone, ids[None], positions[None], self))
        self.generated += 1
        return logits

    def remove(self, rows: Sequence[int]) -> list[int]:
        """Removes rows that have ended; the last rows fill the gaps. Returns the old index of each remaining row."""
        longest = int(self.generated.max())
        kept = _fill_gaps(len(self.generated), set(rows))
        groups = _fill_gaps(
            len(self.prompt_lengths), set(range(len(self.prompt_lengths))) - {self.group_of[r] for r in kept}
        )
        for cache in self.caches.values():
            cache.keep(kept, groups, longest)
        renamed = {old: new for new, old in enumerate(groups)}
        self.prompt_lengths = [self.prompt_lengths[group] for group in groups]
        self.group_of = [renamed[self.group_of[row]] for row in kept]
        self.generated = self.generated[kept]
        self._batch = None
        return kept

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> Tensor:
        assert self._batch is not None
        cache, batch = self.caches[layer], self._batch
        cache.reserve(len(q), batch.width)
        longest = batch.prompt_width + batch.width
        if options.is_plain(longest):
            return batch.attend(cache, q, k, v, options.scale)
        return batch.attend_masked(cache, q, k, v, options, options.window_in(longest))


class _Prefill:
    """Layout of prompts that also keeps their keys and values, [N, Hkv, D] a layer."""

    def __init__(self, inner: Packed):
        self.inner = inner
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> Tensor:
        self.kept[layer] = (k, v)
        return self.inner.attend(layer, q, k, v, options)


class KeyValues:
    """Keys and values of one layer, whatever their form."""

    prompts: list[Tensor]  # keys and values of g prompts, [g, Hkv, P, D] each
    rows: list[Tensor]  # of the generated tokens of n rows, [n, Hkv, T, D] each

    def tensors(self) -> list[Tensor]:
        return [*self.prompts, *self.rows]


class _Cache(KeyValues):
    """Keys and values of one layer: of g prompts [g, Hkv, P, D] and of n rows [n, Hkv, T, D], with spare capacity."""

    def __init__(self, like: Tensor):
        empty = like.new_zeros(0, like.shape[1], 0, like.shape[3])
        self.prompts, self.rows = [empty, empty], [empty, empty]

    def add_prompts(self, first: int, keys: Tensor, values: Tensor) -> None:
        count, _, width, _ = keys.shape
        self.prompts = [_grown(table, first + count, width) for table in self.prompts]
        for table, new in zip(self.prompts, (keys, values), strict=True):
            table[first : first + count, :, :width] = new

    def reserve(self, rows: int, width: int) -> None:
        have, _, columns, _ = self.rows[0].shape
        if rows > have or width > columns:
            columns = columns if width <= columns else max(INITIAL_CACHE_TOKENS, 2 * columns)
            self.rows = [_grown(table, rows, columns) for table in self.rows]

    def add_tokens(self, keys: Tensor, values: Tensor, batch: _Batch) -> None:
        for table, new in zip(self.rows, (keys, values), strict=True):
            if batch.even:
                table[: len(new), :, batch.width - 1] = new
            else:
                table[batch.every_row, :, batch.generated] = new

    def keep(self, rows: list[int], groups: list[int], generated: int) -> None:
        """Copies the rows and groups that fill gaps. Rows beyond the cache have generated nothing yet."""
        for kept, pair, width in ((rows, self.rows, generated), (groups, self.prompts, None)):
            moved = [(new, old) for new, old in enumerate(kept) if new != old and old < len(pair[0])]
            if moved:
                to, place = torch.tensor(moved).T
                for table in pair:
                    table[to, :, :width] = table[place, :, :width]


@dataclass
class _Batch:
    """The rows of the batch by group: `members` [g, m] are the rows of each group, `slot` [n] a row's index in them."""

    row_prompt_lengths: Tensor  # [n]
    members: Tensor
    slot: Tensor
    in_order: bool  # whether all groups have one size and consecutive rows
    beyond_prompt: Tensor | None  # [g, 1, 1, P]: -inf beyond a prompt's end, else 0; None: all have one length
    prompt_width: int
    generated: Tensor  # [n], without the new token
    even: bool  # whether all rows have generated the same number of tokens
    width: int  # generated tokens of the longest row, with the new one
    future: Tensor | None  # [n, 1, 1, T]: -inf beyond a row's last token, else 0; None: the rows are even
    every_row: Tensor  # [n]
    dtype: torch.dtype
    uses_kernel: bool  # attention to generated tokens by `grpo.model.cpu.kernels`, which needs no mask

    @classmethod
    def of(
        cls, prompt_lengths: list[int], group_of: list[int], generated: Tensor, dtype: torch.dtype, uses_kernel: bool
    ) -> _Batch:
        device, rows_of = generated.device, [list[int]() for _ in prompt_lengths]
        for row, group in enumerate(group_of):
            rows_of[group].append(row)
        most = max(map(len, rows_of))
        slot = [0] * len(group_of)
        for group, rows in enumerate(rows_of):
            for number, row in enumerate(rows):
                slot[row] = group * most + number
        width = max(prompt_lengths)
        lengths = torch.tensor([prompt_lengths[group] for group in group_of], device=device)
        ended = torch.arange(width, device=device) >= torch.tensor(prompt_lengths, device=device)[:, None]
        return cls(
            row_prompt_lengths=lengths,
            members=torch.tensor([rows + [rows[0]] * (most - len(rows)) for rows in rows_of], device=device),
            slot=torch.tensor(slot, device=device),
            in_order=slot == [*range(len(rows_of) * most)],
            beyond_prompt=_mask(ended, dtype) if min(prompt_lengths) < width else None,
            prompt_width=width,
            generated=generated,
            even=bool(generated.min() == generated.max()),
            width=int(generated.max()),
            future=None,
            every_row=torch.arange(len(generated), device=device),
            dtype=dtype,
            uses_kernel=uses_kernel,
        )

    def begin(self) -> None:
        """Makes room for one more token a row."""
        self.width += 1
        if not (self.even or self.uses_kernel):
            columns = torch.arange(self.width, device=self.generated.device)
            self.future = _mask(columns > self.generated[:, None], self.dtype)

    def attend(self, cache: _Cache, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """[n, H, D]: one softmax over the prompt and the generated tokens; a group shares its prompt's product."""
        groups = self.members.shape[0]
        prompt_keys, prompt_values = (table[:groups, :, : self.prompt_width] for table in cache.prompts)
        # [n, Hkv, r, D]: the r query heads of one key head are r queries.
        queries = q.view(q.shape[0], k.shape[1], -1, q.shape[2])
        prompt = self._to_groups(queries), prompt_keys, prompt_values
        prompt_output, prompt_lse = partial_attention(*prompt, self.beyond_prompt, scale)
        if self.uses_kernel:
            of_prompt = _to_members(prompt_output, queries), _to_members(prompt_lse, queries), self.slot
            return decode_attention((q, k, v), cache.rows, self.generated, of_prompt, scale)
        cache.add_tokens(k, v, self)
        keys, values = (table[: q.shape[0], :, : self.width] for table in cache.rows)
        own = partial_attention(queries, keys, values, self.future, scale)
        own_output, own_lse = (part.transpose(1, 2) for part in own)
        share = (self._to_rows(prompt_lse, queries) - own_lse).sigmoid_()[..., None]
        output = torch.lerp(own_output, self._to_rows(prompt_output, queries), share.to(q.dtype))
        return output.transpose(1, 2).flatten(1, 2)

    def attend_masked(
        self, cache: _Cache, q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, window: VisibleTokens | None
    ) -> Tensor:
        """[n, H, D]: as `attend`, for layers with windows, softcaps or sinks; copies the prompt for each row."""
        cache.add_tokens(k, v, self)
        groups = self.slot // self.members.shape[1]
        own = [table[: len(q), :, : self.width] for table in cache.rows]
        prompts = [table[:, :, : self.prompt_width].index_select(0, groups) for table in cache.prompts]
        keys, values = (torch.cat(pair, 2) for pair in zip(prompts, own, strict=True))
        places = torch.arange(self.prompt_width + self.width, device=q.device)
        lengths, count = self.row_prompt_lengths[:, None], self.generated[:, None]
        in_prompt = places < self.prompt_width
        positions = torch.where(in_prompt, places, places - self.prompt_width + lengths)
        mask = torch.where(in_prompt, places < lengths, places - self.prompt_width <= count)
        if window is not None:
            mask = mask & window.mask(lengths + count, positions)
        return masked_attention(q[:, :, None], keys, values, options, mask[:, None, None]).squeeze(2)

    def _to_groups(self, rows: Tensor) -> Tensor:
        """[n, Hkv, r, D] to [g, Hkv, m * r, D]."""
        (groups, most), (_, heads, _, width) = self.members.shape, rows.shape
        grouped = rows.view(groups, most, *rows.shape[1:]) if self.in_order else rows[self.members]
        return grouped.transpose(1, 2).reshape(groups, heads, -1, width)

    def _to_rows(self, groups: Tensor, queries: Tensor) -> Tensor:
        """As `_to_members`, in the order of the rows, [n, r, Hkv, ...]."""
        members = _to_members(groups, queries)
        return members if self.in_order else members[self.slot]


def _to_members(groups: Tensor, queries: Tensor) -> Tensor:
    """[g, Hkv, m * r, ...] to [g * m, r, Hkv, ...], for queries [n, Hkv, r, D]: the CPU kernel's order."""
    return groups.transpose(1, 2).reshape(-1, queries.shape[2], queries.shape[1], *groups.shape[3:])


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask of scores [n, 1, 1, T]: -inf where `hidden` [n, T], else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None, None]


def _fill_gaps(count: int, gone: set[int]) -> list[int]:
    """Old index of each remaining element, after the last ones have filled the gaps of those `gone`."""
    left = count - len(gone)
    movers = iter(place for place in range(left, count) if place not in gone)
    return [next(movers) if place in gone else place for place in range(left)]


def _grown(table: Tensor, rows: int, columns: int) -> Tensor:
    """`table` [n, Hkv, T, D], grown to so many rows and columns. With zeros: masked entries must be finite."""
    size = (len(table), table.shape[2])
    if size[0] >= rows and size[1] >= columns:
        return table
    grown = table.new_zeros(max(rows, size[0]), table.shape[1], max(columns, size[1]), table.shape[3])
    grown[: size[0], :, : size[1]] = table
    return grown
