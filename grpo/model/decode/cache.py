"""Key-value caches for decoding: of the groups' prompts, and of the tokens that each row has generated."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo.model.cpu.limits import INITIAL_CACHE_TOKENS
from grpo.model.packed.transfer import to_device


class KeyValues:
    """Keys and values of one layer, in any form."""

    prompts: list[Tensor]  # keys and values of g prompts, [g, Hkv, P, D] each
    rows: list[Tensor]  # of the generated tokens of n rows, [n, Hkv, T, D] each

    def tensors(self) -> list[Tensor]:
        return [*self.prompts, *self.rows]


class Cache(KeyValues):
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

    def keep(self, rows: list[int], groups: list[int], generated: int) -> None:
        """Moves rows and groups into the gaps. Rows beyond the cache have not generated anything yet."""
        for kept, pair, width in ((rows, self.rows, generated), (groups, self.prompts, None)):
            moved = [(new, old) for new, old in enumerate(kept) if new != old and old < len(pair[0])]
            if moved:
                to, place = to_device(torch.tensor(moved).T, pair[0].device)
                for table in pair:
                    table[to, :, :width] = table[place, :, :width]


def _grown(table: Tensor, rows: int, columns: int) -> Tensor:
    """`table` [n, Hkv, T, D] with room for `rows` rows and `columns` columns. A new one has no place for rows that have
    ended: the last sequences of a batch are its longest. Padded with zeros, because masked entries must be finite."""
    if len(table) >= rows and table.shape[2] >= columns:
        return table
    kept, width = table[:rows], table.shape[2]
    grown = table.new_zeros(rows, table.shape[1], max(columns, width), table.shape[3])
    grown[: len(kept), :, :width] = kept
    return grown
