"""Records the experts that a policy's routers choose during sampling, so that the update can replay them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo.model.routers import Routing, recorded, replayed_routers


class ChosenExperts:
    """The choices of L routers with K experts per token, for prompts and for the rows of unfinished completions."""

    def __init__(self) -> None:
        self._calls: list[list[Routing]] = []
        self._prompts: dict[int, Tensor] = {}  # [P, L, K] per prompt
        self._rows = torch.zeros(0)  # [n, T, L, K], with spare columns

    @contextmanager
    def recording(self, model: Any) -> Iterator[None]:
        """Context in which the choices of the model's routers are recorded, if the update replays them."""
        with recorded(replayed_routers(model)) as self._calls:
            yield

    def join(self, numbers: Sequence[int], lengths: Sequence[int], ends: Sequence[int], size: int) -> None:
        """Call after a forward pass over a pack of prompts. `lengths` and `ends`: each prompt's token count and the
        index of its last token in the pack. Each prompt gets `size` rows."""
        if not self._calls:
            return
        chosen = self._take()
        for number, length, end in zip(numbers, lengths, ends, strict=True):
            self._prompts[number] = chosen[end + 1 - length : end + 1]
        if not self._rows.numel():
            self._rows = chosen.new_zeros(len(self._rows), 1, *chosen.shape[1:])
        self._rows = torch.cat([self._rows, self._rows.new_zeros(len(numbers) * size, *self._rows.shape[1:])])

    def step(self, counts: Tensor, longest: int) -> None:
        """Call after each row's token number `counts` [n, 1], from 1 to `longest`, was computed."""
        if not self._calls:
            return
        if longest > self._rows.shape[1]:
            self._rows = pad(self._rows, (0, 0, 0, 0, 0, longest))
        chosen = self._take()
        place = (counts.to(chosen.device) - 1)[:, :, None, None].expand(-1, 1, *chosen.shape[1:])
        self._rows.scatter_(1, place, chosen[:, None])

    def of(self, row: int, number: int, count: int) -> Tensor | None:
        """The choices for prompt `number` and the first `count` tokens of its row `row`, [P + count, L, K], on the
        host."""
        return torch.cat([self._prompts[number], self._rows[row, :count]]).cpu() if self._calls else None

    def keep(self, index: Tensor) -> None:
        if self._calls:
            self._rows = self._rows.index_select(0, index.to(self._rows.device))

    def _take(self) -> Tensor:
        """The routers' choices in the last forward pass, [N, L, K]."""
        chosen = torch.stack([calls[-1].experts for calls in self._calls], 1).short()
        for calls in self._calls:
            calls.clear()
        return chosen
