"""Attention of one decoding step: the batch's rows by group, and the tokens that each row sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo.model.cpu.kernels import decode_attention
from grpo.model.decode.cache import Cache
from grpo.model.decode.partial_attention import partial_attention
from grpo.model.packed.scores import ScoreOptions, VisibleTokens, masked_attention
from grpo.model.packed.transfer import to_device


@dataclass
class StepRows:
    """The batch's rows by group. `members` [g, m]: the rows of each group; `slot` [n]: each row's index in
    `members`."""

    row_prompt_lengths: Tensor  # [n]
    members: Tensor
    slot: Tensor
    in_order: bool  # whether all groups have the same size and consecutive rows
    beyond_prompt: Tensor | None  # [g, 1, 1, P]: -inf beyond a prompt's end, else 0; None: equal lengths
    prompt_width: int
    generated: Tensor  # [n], without the new token
    even: bool  # whether all rows have generated the same number of tokens
    width: int  # generated tokens of the longest row, including the new one
    future: Tensor | None  # [n, 1, 1, T]: -inf beyond a row's last token, else 0; None: the rows are even
    every_row: Tensor  # [n]
    dtype: torch.dtype
    uses_kernel: bool  # `grpo.model.cpu.kernels` attends to generated tokens, without a mask
    capacity: int | None = None  # generated tokens that each step reads, so that all have one shape; None: no more
    # than there are

    @classmethod
    def of(
        cls,
        prompt_lengths: list[int],
        group_of: list[int],
        generated: Tensor,
        counts: list[int],
        dtype: torch.dtype,
        uses_kernel: bool,
    ) -> StepRows:
        """`counts`: the same numbers as `generated`, on the host."""
        device, rows_of = generated.device, [list[int]() for _ in prompt_lengths]

        def there(values: list[Any]) -> Tensor:
            return to_device(torch.tensor(values), device)

        for row, group in enumerate(group_of):
            rows_of[group].append(row)
        most = max(map(len, rows_of))
        slot = [0] * len(group_of)
        for group, rows in enumerate(rows_of):
            for number, row in enumerate(rows):
                slot[row] = group * most + number
        width = max(prompt_lengths)
        ended = torch.arange(width, device=device) >= there(prompt_lengths)[:, None]
        return cls(
            row_prompt_lengths=there([prompt_lengths[group] for group in group_of]),
            members=there([rows + [rows[0]] * (most - len(rows)) for rows in rows_of]),
            slot=there(slot),
            in_order=slot == [*range(len(rows_of) * most)],
            beyond_prompt=_mask(ended, dtype) if min(prompt_lengths) < width else None,
            prompt_width=width,
            generated=generated,
            even=min(counts) == max(counts),
            width=max(counts),
            future=None,
            every_row=torch.arange(len(generated), device=device),
            dtype=dtype,
            uses_kernel=uses_kernel,
        )

    def begin(self) -> None:
        """Makes room for one more token per row."""
        if self.capacity is not None:
            self.width, self.even = self.capacity, False
        else:
            self.width += 1
        if not (self.even or self.uses_kernel):
            columns = torch.arange(self.width, device=self.generated.device)
            self.future = _mask(columns > self.generated[:, None], self.dtype)

    def attend(self, cache: Cache, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention [n, H, D]: one softmax over prompt and generated tokens. Each group's prompt is read once for all
        its rows."""
        groups = self.members.shape[0]
        prompt_keys, prompt_values = (table[:groups, :, : self.prompt_width] for table in cache.prompts)
        # [n, Hkv, r, D]: the r query heads of one key head become r queries.
        queries = q.view(q.shape[0], k.shape[1], -1, q.shape[2])
        prompt = self._to_groups(queries), prompt_keys, prompt_values
        prompt_output, prompt_lse = partial_attention(*prompt, self.beyond_prompt, scale)
        if self.uses_kernel:
            of_prompt = _to_members(prompt_output, queries), _to_members(prompt_lse, queries), self.slot
            return decode_attention((q, k, v), cache.rows, self.generated, of_prompt, scale)
        self._add_tokens(cache, k, v)
        keys, values = (table[: q.shape[0], :, : self.width] for table in cache.rows)
        own = partial_attention(queries, keys, values, self.future, scale)
        own_output, own_lse = (part.transpose(1, 2) for part in own)
        share = (self._to_rows(prompt_lse, queries) - own_lse).sigmoid_()[..., None]
        output = torch.lerp(own_output, self._to_rows(prompt_output, queries), share.to(q.dtype))
        return output.transpose(1, 2).flatten(1, 2)

    def attend_masked(
        self, cache: Cache, q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, window: VisibleTokens | None
    ) -> Tensor:
        """Like `attend`, [n, H, D], for layers with windows, softcaps or sinks; copies the prompt for each row."""
        self._add_tokens(cache, k, v)
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

    def _add_tokens(self, cache: Cache, keys: Tensor, values: Tensor) -> None:
        for table, new in zip(cache.rows, (keys, values), strict=True):
            if self.even:
                table[: len(new), :, self.width - 1] = new
            else:
                table[self.every_row, :, self.generated] = new

    def _to_groups(self, rows: Tensor) -> Tensor:
        """[n, Hkv, r, D] to [g, Hkv, m * r, D]."""
        (groups, most), (_, heads, _, width) = self.members.shape, rows.shape
        grouped = rows.view(groups, most, *rows.shape[1:]) if self.in_order else rows[self.members]
        return grouped.transpose(1, 2).reshape(groups, heads, -1, width)

    def _to_rows(self, groups: Tensor, queries: Tensor) -> Tensor:
        """Like `_to_members`, in row order, [n, r, Hkv, ...]."""
        members = _to_members(groups, queries)
        return members if self.in_order else members[self.slot]


def _to_members(groups: Tensor, queries: Tensor) -> Tensor:
    """[g, Hkv, m * r, ...] to [g * m, r, Hkv, ...], for queries [n, Hkv, r, D]: the CPU kernel's order."""
    return groups.transpose(1, 2).reshape(-1, queries.shape[2], queries.shape[1], *groups.shape[3:])


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask of scores [n, 1, 1, T]: -inf where `hidden` [n, T], else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None, None]
