"""Runs modules that mix tokens in their own way on each sequence of a pack separately: recurrent layers, convolutions,
and attention or embeddings that derive positions from the index.

transformers passes some of them arguments for packed sequences (`seq_idx`, `cu_seq_lens_q`), but only its CUDA kernels
use these. Padding a row on the right is always correct, because later tokens do not affect earlier ones. So for such a
module, the pack's sequences, including shared prompts, become rows [R, L], and its outputs are put back into one row of
tokens. The rest of the model stays packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from grpo.errors import InputError
from grpo.model.packed.attention import Packed
from grpo.model.packed.current import current_layout, running
from grpo.model.packed.scores import VisibleTokens

MASK, LEFT_OUT = "mask", "left out"
ALONE = "rows of one sequence each"
"""Value of the layout inside a module that runs by rows."""


def run_by_rows(modules: Iterable[Any], changed: dict[int | str, str], attention: str) -> None:
    """Makes modules of one class run on each sequence of a pack separately, with transformers' attention implementation
    `attention`.

    `changed`: arguments, by position or name, that transformers passes in another form for single sequences: as a MASK
    [B, 1, L, L], or LEFT_OUT because the module derives them.
    """
    for module in modules:
        module.changed_for_rows, module.attention_for_rows = changed, attention
        module.forward = MethodType(_by_rows, module)


def runs_by_rows(module: Any) -> bool:
    """Whether `run_by_rows` changed the module."""
    return getattr(module.forward, "__func__", None) is _by_rows


def has_rows(backbone: Any) -> bool:
    """Whether part of a transformer runs by rows, so that it cannot be decoded from cached keys and values alone."""
    return any(map(runs_by_rows, backbone.modules()))


def _by_rows(self: Any, *args: Any, **kwargs: Any) -> Any:
    layout = kwargs.pop("layout", None) or current_layout()
    if layout is None or layout is ALONE:
        return type(self).forward(self, *args, **kwargs)
    if not isinstance(layout, Packed):
        raise RuntimeError("a module that runs by rows has a state, which keys and values do not hold")
    outputs = []
    with running(ALONE), _attending(self, self.attention_for_rows):
        for places in layout.rows:
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            for place, value in given.items():
                form = self.changed_for_rows.get(place)
                if form == MASK:
                    given[place] = _row_mask(value, places, self)
                else:
                    given[place] = None if form == LEFT_OUT else _taken(value, places, layout.tokens)
            row_args = [given.pop(i) for i in range(len(args))]
            outputs.append(type(self).forward(self, *row_args, **given))
    return _joined(outputs, layout)


@contextmanager
def _attending(module: Any, implementation: str) -> Iterator[None]:
    """Context in which a module uses transformers' attention `implementation`."""
    configs = {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    for config in configs.values():
        config._attn_implementation_internal = implementation
    try:
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own


def _taken(value: Any, places: Tensor, tokens: int) -> Any:
    """Selects the tokens at `places` [R, L] from an argument [1, tokens, ...]; returns arguments without a token
    dimension unchanged."""
    if isinstance(value, Tensor):
        if value.shape == (tokens,):  # positions, counted from the first token
            return value[: places.shape[1]]
        return value[0][places] if value.shape[:2] == (1, tokens) else value
    if isinstance(value, tuple | list):
        if all(isinstance(size, int) for size in value) and tuple(value) == (1, tokens):  # the shape of the ids
            return places.shape
        return type(value)(_taken(part, places, tokens) for part in value)
    return value


def _row_mask(rule: Any, places: Tensor, module: Any) -> Tensor:
    """The mask of rows [R, L] in transformers' form for eager attention, [R, 1, L, L]: 0, or the dtype's smallest
    number for keys that are not seen."""
    dtype = next(module.parameters()).dtype
    positions = torch.arange(places.shape[1], device=places.device)
    seen = positions <= positions[:, None]
    if isinstance(rule, VisibleTokens):
        seen = seen & rule.mask(positions[:, None], positions)
    mask = torch.zeros(seen.shape, dtype=dtype, device=places.device).masked_fill_(~seen, torch.finfo(dtype).min)
    return mask.expand(len(places), 1, *mask.shape)


def _joined(outputs: list[Any], layout: Packed) -> Any:
    """Converts outputs of rows [R, L, ...] to outputs of the pack's tokens [1, N, ...]."""
    first = outputs[0]
    if isinstance(first, tuple | list):
        return type(first)(_joined([output[i] for output in outputs], layout) for i in range(len(first)))
    if not isinstance(first, Tensor):
        return None
    slots = []
    for output, places in zip(outputs, layout.rows, strict=True):
        if output.shape[:1] == places.shape[1:]:
            output = output[None]
        if output.shape[:2] == (1, places.shape[1]):  # depends on positions only
            output = output.expand(*places.shape, *output.shape[2:])
        if output.shape[:2] != places.shape:
            return None  # something else, such as attention weights
        slots.append(output.flatten(0, 1))
    if len({rows.shape[1:] for rows in slots}) > 1:
        raise InputError("what a part of the model returns is wider for longer sequences")
    return torch.cat(slots)[layout.slot_in_rows][None]
