"""Token by token for many sequences at once: caches of keys and values, and what each new token looks at.

A group's prompt is cached once; each sequence has a cache of its own for what it has said. Sequences that end leave the
batch at once, and groups that wait take their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo.model.decoding import INITIAL_CACHE_TOKENS, decode_attention, make_decode_step, supports
from grpo.model.packed.attention import Packed, hidden_states
from grpo.model.packed.logprobs import backbone_of
from grpo.model.packed.packing import pack


class Decoder:
    """The sequences that are being written: rows 0 to n - 1, and their groups 0 to g - 1."""

    def __init__(self, model: Any, packed_rows: int = 0):
        """`packed_rows`: as `prepacked_rows` of `grpo.model.fused.decode_step.DecodeStep`."""
        self.backbone, self.head = backbone_of(model), model.get_output_embeddings()
        self.device = next(model.parameters()).device
        self._decode_step = make_decode_step(self.backbone, self.head, packed_rows)
        self.caches: dict[int, _Cache] = {}
        self.prompt_lengths: list[int] = []  # of the groups
        self.group_of: list[int] = []  # of the rows
        self.said = torch.zeros(0, dtype=torch.long, device=self.device)  # tokens that each row has said
        self._batch: _Batch | None = None

    @property
    def longest(self) -> int:
        assert self._batch is not None
        return self._batch.prompt_width + self._batch.width

    def join(self, prompts: Sequence[Sequence[int]], size: int) -> Tensor:
        """Take in groups of `size` rows each, behind the others. Returns the logits after each prompt, [g, V]."""
        packed = pack(prompts, [[] for _ in prompts], self.device)
        layout = _Prefill(packed.attention)
        hidden = hidden_states(self.backbone, packed.ids, packed.positions, layout)
        first, width = len(self.prompt_lengths), max(map(len, prompts))
        # Shorter prompts are filled up with any token; it is masked.
        index = [
            [*range(end - len(prompt) + 1, end + 1), *([end] * (width - len(prompt)))]
            for prompt, end in zip(prompts, packed.last, strict=True)
        ]
        places = torch.tensor(index, device=self.device)
        self.prompt_lengths += map(len, prompts)
        self.group_of += [first + number for number in range(len(prompts)) for _ in range(size)]
        self.said = torch.cat([self.said, self.said.new_zeros(len(prompts) * size)])
        for layer, (keys, values) in layout.kept.items():
            shared = keys[places].transpose(1, 2), values[places].transpose(1, 2)
            self.caches.setdefault(layer, _Cache(shared[0])).add_prompts(first, *shared)
        self._batch = None
        return self.head(hidden[torch.tensor(packed.last, device=self.device)])

    def step(self, tokens: Tensor) -> Tensor:
        """Each row says its token, of [n]. Returns the logits of the next, [n, V]."""
        if self._batch is None:
            cache = next(iter(self.caches.values()))
            self._batch = _Batch.of(self.prompt_lengths, self.group_of, self.said, like=cache.rows[0])
        self._batch.begin()
        ids, positions = tokens.to(self.device), self._batch.row_prompt_lengths + self.said
        if self._decode_step is not None:
            logits = self._decode_step(ids, positions, self.attend)
        else:
            logits = self.head(hidden_states(self.backbone, ids[None], positions[None], self))
        self.said += 1
        return logits

    def leave(self, rows: Sequence[int]) -> list[int]:
        """These rows have ended. Returns which row each of those that are left was: the last ones fill the gaps."""
        longest = int(self.said.max())
        kept = _fill_gaps(len(self.said), set(rows))
        groups = _fill_gaps(
            len(self.prompt_lengths), set(range(len(self.prompt_lengths))) - {self.group_of[r] for r in kept}
        )
        for cache in self.caches.values():
            cache.keep(kept, groups, longest)
        renamed = {old: new for new, old in enumerate(groups)}
        self.prompt_lengths = [self.prompt_lengths[group] for group in groups]
        self.group_of = [renamed[self.group_of[row]] for row in kept]
        self.said = self.said[kept]
        self._batch = None
        return kept

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        assert self._batch is not None
        cache, scale = self.caches[layer], scale if scale is not None else q.shape[-1] ** -0.5
        cache.make_room(len(q), self._batch.width)
        return self._batch.attend(cache, q, k, v, scale)


class _Prefill:
    """Attention of prompts that keeps their keys and values, [N, Hkv, D] a layer."""

    def __init__(self, inner: Packed):
        self.inner, self.longest = inner, inner.longest
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        self.kept[layer] = (k, v)
        return self.inner.attend(layer, q, k, v, scale)


class _Cache:
    """Keys and values of one layer: of g prompts [g, Hkv, P, D], of n rows [n, Hkv, T, D], and room beyond."""

    def __init__(self, like: Tensor):
        empty = like.new_zeros(0, like.shape[1], 0, like.shape[3])
        self.prompts, self.rows = [empty, empty], [empty, empty]

    def add_prompts(self, first: int, keys: Tensor, values: Tensor) -> None:
        count, _, width, _ = keys.shape
        self.prompts = [_with_room(held, first + count, width) for held in self.prompts]
        for held, new in zip(self.prompts, (keys, values), strict=True):
            held[first : first + count, :, :width] = new

    def make_room(self, rows: int, width: int) -> None:
        have, _, columns, _ = self.rows[0].shape
        if rows > have or width > columns:
            columns = columns if width <= columns else max(INITIAL_CACHE_TOKENS, 2 * columns)
            self.rows = [_with_room(held, rows, columns) for held in self.rows]

    def add_tokens(self, keys: Tensor, values: Tensor, batch: _Batch) -> None:
        for held, new in zip(self.rows, (keys, values), strict=True):
            if batch.future is None:
                held[: len(new), :, batch.width - 1] = new
            else:
                held[batch.every_row, :, batch.said] = new

    def keep(self, rows: list[int], groups: list[int], said: int) -> None:
        """Those who fill gaps are copied; nobody else moves. Rows beyond the cache have said nothing yet."""
        for kept, pair, width in ((rows, self.rows, said), (groups, self.prompts, None)):
            moved = [(new, old) for new, old in enumerate(kept) if new != old and old < len(pair[0])]
            if moved:
                to, place = torch.tensor(moved).T
                for held in pair:
                    held[to, :, :width] = held[place, :, :width]


@dataclass
class _Batch:
    """Who is in the batch: `members` [g, m] are the rows of each group, `slot` [n] where a row stands among them."""

    row_prompt_lengths: Tensor  # [n]
    members: Tensor
    slot: Tensor
    in_order: bool  # whether all groups are as large and their rows stand one after the other
    beyond_prompt: Tensor | None  # [g, 1, 1, P]: -inf where a prompt has ended, else 0; None: all are as long
    prompt_width: int
    said: Tensor  # [n]: without the new token
    even: bool  # whether all have said as much
    width: int  # tokens of the longest row, the new one included
    future: Tensor | None  # [n, 1, 1, T]: -inf for what a row has not said, else 0; None: they are even
    every_row: Tensor  # [n]
    dtype: torch.dtype
    compiled: bool  # whether own tokens are looked at by `grpo.model.cpu.kernels`, which needs no mask

    @classmethod
    def of(cls, prompt_lengths: list[int], group_of: list[int], said: Tensor, like: Tensor) -> _Batch:
        device, rows_of = said.device, [list[int]() for _ in prompt_lengths]
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
            beyond_prompt=_mask(ended, like.dtype) if min(prompt_lengths) < width else None,
            prompt_width=width,
            said=said,
            even=bool(said.min() == said.max()),
            width=int(said.max()),
            future=None,
            every_row=torch.arange(len(said), device=device),
            dtype=like.dtype,
            compiled=supports(like),
        )

    def begin(self) -> None:
        """Each row is about to say a token."""
        self.width += 1
        if not (self.even or self.compiled):
            columns = torch.arange(self.width, device=self.said.device)
            self.future = _mask(columns > self.said[:, None], self.dtype)

    def attend(self, cache: _Cache, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """[n, H, D]: softmax over prompt and own tokens together; the product with a prompt is one for its group."""
        groups = self.members.shape[0]
        prompt_keys, prompt_values = (held[:groups, :, : self.prompt_width] for held in cache.prompts)
        # [n, Hkv, r, D]: heads of the same keys are as many queries.
        asked = q.view(q.shape[0], k.shape[1], -1, q.shape[2])
        of_prompt, mass_prompt = _look(self._to_groups(asked), prompt_keys, prompt_values, self.beyond_prompt, scale)
        if self.compiled:
            found = _of_members(of_prompt, asked), _of_members(mass_prompt, asked), self.slot
            return decode_attention((q, k, v), cache.rows, self.said, found, scale)
        cache.add_tokens(k, v, self)
        keys, values = (held[: q.shape[0], :, : self.width] for held in cache.rows)
        of_own, mass_own = (found.transpose(1, 2) for found in _look(asked, keys, values, self.future, scale))
        share = (self._to_rows(mass_prompt, asked) - mass_own).sigmoid_()[..., None]
        seen = torch.lerp(of_own, self._to_rows(of_prompt, asked), share.to(q.dtype))
        return seen.transpose(1, 2).flatten(1, 2)

    def _to_groups(self, rows: Tensor) -> Tensor:
        """[n, Hkv, r, D] to [g, Hkv, m * r, D]."""
        (groups, most), (_, heads, _, width) = self.members.shape, rows.shape
        grouped = rows.view(groups, most, *rows.shape[1:]) if self.in_order else rows[self.members]
        return grouped.transpose(1, 2).reshape(groups, heads, -1, width)

    def _to_rows(self, groups: Tensor, asked: Tensor) -> Tensor:
        """As `_of_members`, in the order of the rows, [n, r, Hkv, ...]."""
        found = _of_members(groups, asked)
        return found if self.in_order else found[self.slot]


def _of_members(groups: Tensor, asked: Tensor) -> Tensor:
    """[g, Hkv, m * r, ...] to [g * m, r, Hkv, ...], for queries [n, Hkv, r, D]: the order in which the CPU's kernel
    writes."""
    return groups.transpose(1, 2).reshape(-1, asked.shape[2], asked.shape[1], *groups.shape[3:])


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores, [n, 1, 1, T], where keys [n, T] are hidden."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None, None]


def _look(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs [n, H, L, D] of queries that look at all keys but those of the mask, and the log of the softmax's masses,
    [n, H, L], by which outputs over parts of the keys can be put together."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    scores = (q * scale) @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores + mask
    mass = scores.float().logsumexp(-1)
    return (scores - mass[..., None]).exp().to(v.dtype) @ v, mass


def _fill_gaps(count: int, gone: set[int]) -> list[int]:
    """Who stands in each place after the last ones have taken the places of those who are gone."""
    left = count - len(gone)
    movers = iter(place for place in range(left, count) if place not in gone)
    return [next(movers) if place in gone else place for place in range(left)]


def _with_room(held: Tensor, rows: int, columns: int) -> Tensor:
    """`held` [n, Hkv, T, D] with room for so many rows and columns. Zeros: what is masked must still be a number."""
    have = (len(held), held.shape[2])
    if have[0] >= rows and have[1] >= columns:
        return held
    room = held.new_zeros(max(rows, have[0]), held.shape[1], max(columns, have[1]), held.shape[3])
    room[: have[0], :, : have[1]] = held
    return room
