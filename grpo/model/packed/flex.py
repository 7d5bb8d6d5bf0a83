"""Attention over a whole pack in one call of PyTorch's FlexAttention, without gathering tokens into rows.

A GPU skips the blocks of a pack in which no token sees another. On a CPU the same rule runs without skipping, for
tests. It is off, because on a GPU a model of 1.5B took 278 ms for an update with it, and 190 ms by rows (docs/gpu.md;
`benchmarks/gpu.py --parts attention`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from grpo.model.packed.scores import ScoreOptions, VisibleTokens
from grpo.model.packed.transfer import to_device

_CHOSEN: ContextVar[bool] = ContextVar("flex", default=False)


@contextmanager
def with_flex() -> Iterator[None]:
    """Context in which packs use FlexAttention."""
    token = _CHOSEN.set(True)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def is_chosen() -> bool:
    """Whether packs use FlexAttention."""
    return _CHOSEN.get()


class FlexPack:
    """The rule that says which of N tokens see each other. A sequence is a shared prompt or the tokens that follow
    one."""

    def __init__(self, calls: Sequence[Any], tokens: int, longest: int, device: torch.device):
        """`calls`: the `grpo.model.packed.attention.Rows` of the pack, on the host. `longest`: tokens of its longest
        sequence, including the prompt."""
        own, prompt, position = (torch.full((tokens,), -1) for _ in range(3))
        count = 0
        for rows in calls:
            numbers = torch.arange(count, count + len(rows.places))[:, None].expand_as(rows.places)
            places = torch.arange(rows.places.shape[1]).expand_as(rows.places) + rows.before.shape[1]
            own[rows.places[rows.real]] = numbers[rows.real]
            position[rows.places[rows.real]] = places[rows.real]
            count += len(rows.places)
        for rows in calls:  # a prompt in several calls gets the number of the last call
            if rows.before.shape[1]:
                of_row = own[rows.before[:, :1]].expand_as(rows.places)
                prompt[rows.places[rows.real]] = of_row[rows.real]
        self.own, self.prompt, self.position = (to_device(table, device) for table in (own, prompt, position))
        self.tokens, self.longest, self.device = tokens, longest, device
        self._masks: dict[VisibleTokens | None, Any] = {}

    def sees(self, window: VisibleTokens | None) -> Callable[[Any, Any, Any, Any], Tensor]:
        """FlexAttention's `mask_mod`: whether token i sees token j."""
        own, prompt, position = self.own, self.prompt, self.position

        def mask(row: Any, head: Any, i: Any, j: Any) -> Tensor:
            seen: Tensor = ((own[j] == own[i]) | (own[j] == prompt[i])) & (position[j] <= position[i])
            return seen if window is None else seen & window.sees(row, head, position[i], position[j])

        return mask

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> Tensor:
        """See `grpo.model.packed.attention.Layout.attend`."""
        window = options.window_in(self.longest)
        if window not in self._masks:
            sizes = (1, 1, self.tokens, self.tokens)
            self._masks[window] = create_block_mask(self.sees(window), *sizes, device=self.device.type)
        output, aux = _flex(self.device.type)(
            *(states.transpose(0, 1)[None] for states in (q, k, v)),
            score_mod=None if options.softcap is None else _capped(options.softcap),
            block_mask=self._masks[window],
            scale=options.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        if options.sinks is not None:  # an additional key without a value takes a share of the softmax
            share = (aux.lse - options.sinks.float()[:, None]).sigmoid()[..., None]
            output = output * share.to(output.dtype)
        attended: Tensor = output[0].transpose(0, 1)
        return attended


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, row: Any, head: Any, i: Any, j: Any) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


@cache
def _flex(device: str) -> Any:
    """Compiled, as intended for FlexAttention. On a CPU it has no backward pass, compiled or not."""
    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True)
