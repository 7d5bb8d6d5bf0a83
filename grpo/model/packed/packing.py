"""Packs sequences without padding, with a group's prompt stored once for all its completions.

A pack is one row of tokens, [1, N]. A layout says which tokens each token may see (`grpo.model.packed.attention`). So
only the attention of a model is affected, and there is no [N, N] mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.model.packed.attention import Packed, Rows
from grpo.model.packed.transfer import to_device

Tokens = Sequence[int]
PASS_TOKENS = 2**16
"""Most tokens of a forward pass without gradients where no setting bounds them, and with them its activations."""


@dataclass(frozen=True)
class Pack:
    """B sequences, each a prompt and a rest. Equal prompts are stored once."""

    ids: Tensor  # [1, N]
    positions: Tensor  # [1, N], counted from the start of each sequence
    attention: Packed
    last: list[int]  # B: index of each sequence's last token in the pack
    first: list[int]  # B: index of the last token of each sequence's prompt
    starts: list[int]  # B: index of the first token after the prompt


def pack(
    prompts: Sequence[Tokens], rests: Sequence[Tokens], device: torch.device, unfused: bool = False, multiple: int = 1
) -> Pack:
    """Packs the sequences prompt + rest. Either may be empty, not both. `unfused`: see
    `grpo.model.packed.attention.Packed`. `multiple`: of it N is made a multiple, by a sequence of zeros at the end that
    nothing sees.

    A prompt that only one sequence has is treated as part of its rest. Shared prompts of the same length and the rests
    that follow them share one attention call.
    """
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(tuple(prompt) or (-1, row), []).append(row)
    ids: list[int] = []
    spans: list[tuple[int, int]] = []  # of positions: the first, and how many
    starts, first, last = ([0] * len(prompts) for _ in range(3))
    calls: dict[tuple[int, int], _Spans] = {}
    for rows in rows_of.values():
        prompt = prompts[rows[0]]
        begin, length = len(ids), len(prompt)
        shared = length if len(rows) > 1 else 0
        ids += prompt
        spans.append((0, length))
        for row in rows:
            starts[row], first[row] = len(ids), begin + length - 1
            ids += rests[row]
            spans.append((length, len(rests[row])))
            last[row] = len(ids) - 1 if rests[row] else first[row]
        for row in rows:
            start, stop = (starts[row], starts[row] + len(rests[row])) if shared else (begin, len(ids))
            if stop > start or shared:
                calls.setdefault((shared, _width(stop - start)), _Spans()).add(begin, start, stop)
    if padding := -len(ids) % multiple:
        calls.setdefault((0, _width(padding)), _Spans()).add(len(ids), len(ids), len(ids) + padding)
        ids += [0] * padding
        spans.append((0, padding))
    return Pack(
        ids=to_device(integers(ids)[None], device),
        positions=to_device(ranges(*integers(spans).T)[None], device),
        attention=Packed(
            [c for (shared, _), group in calls.items() for c in group.rows(shared)], len(ids), device, unfused
        ),
        last=last,
        first=first,
        starts=starts,
    )


def integers(values: Sequence[Any]) -> Tensor:
    """`torch.tensor` of int64, six times as fast for long lists."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The concatenation of range(start, start + length) for K pairs, [sum of lengths]."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - before).repeat_interleave(lengths)


def shared_prefix(rows: Sequence[Tokens]) -> int:
    """Number of leading tokens that all rows have in common."""
    first, last = min(map(list, rows)), max(map(list, rows))
    differing = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return next(differing, min(len(first), len(last)))


class _Spans:
    """Collects the sequences of one attention call."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int, int]] = []  # start of the prompt, start and end of the sequence

    def add(self, prompt: int, start: int, stop: int) -> None:
        self.spans.append((prompt, start, stop))

    def rows(self, shared: int) -> list[Rows]:
        """The sequences as attention calls: first the shared prompts of `shared` tokens, then the rests that follow
        them."""
        begin, start, stop = integers(self.spans).T[:, :, None]
        lengths = stop - start
        places = start + torch.arange(int(lengths.max()))
        # Padding may point anywhere: it comes after every real token, so no query sees it.
        places = torch.where(places < stop, places, begin)
        before = begin + torch.arange(shared)
        calls = [Rows(places, lengths.squeeze(1), before)]
        if shared:
            prompts = begin.unique()[:, None] + torch.arange(shared)
            full = torch.full((len(prompts),), shared)
            calls.insert(0, Rows(prompts, full, prompts[:, :0]))
        return calls


def _width(length: int) -> int:
    """Padded length of a sequence in its attention call: the next power of 2, at least 64, so that at most half of a
    call of long sequences is padding."""
    return max(64, 1 << max(0, length - 1).bit_length())


def micro_batches(
    prompts: Sequence[Tokens], rests: Sequence[Tokens], units: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Indices of `units` (rows that belong together) per micro-batch. No pack holds more than `max_tokens`, unless a
    single unit does.

    Units that share a prompt stay together as far as they fit; the resulting parts are placed by best fit, longest
    first.
    """
    units_by_prompt: dict[tuple[int, ...], list[int]] = {}
    for number, rows in enumerate(units):
        units_by_prompt.setdefault(tuple(prompts[rows[0]]), []).append(number)
    parts: list[tuple[int, list[int]]] = []
    for prompt, numbers in units_by_prompt.items():
        costs = {number: sum(len(rests[row]) for row in units[number]) for number in numbers}
        parts += _parts(len(prompt), costs, max_tokens)
    bins: list[tuple[int, list[int]]] = []  # room left, units
    for cost, numbers in sorted(parts, key=lambda part: -part[0]):
        fitting = [(room, i) for i, (room, _) in enumerate(bins) if room >= cost]
        if fitting:
            room, i = min(fitting)
            bins[i] = (room - cost, bins[i][1] + numbers)
        else:
            bins.append((max_tokens - cost, list(numbers)))
    return [numbers for _, numbers in bins]


def _parts(prompt: int, costs: dict[int, int], max_tokens: int) -> list[tuple[int, list[int]]]:
    """Splits the units of one prompt into parts that fit, as (tokens, units), longest unit first."""
    parts: list[tuple[int, list[int]]] = []
    for number in sorted(costs, key=lambda n: -costs[n]):
        for i, (tokens, numbers) in enumerate(parts):
            if tokens + costs[number] <= max_tokens:
                parts[i] = (tokens + costs[number], [*numbers, number])
                break
        else:
            parts.append((prompt + costs[number], [number]))
    return parts
