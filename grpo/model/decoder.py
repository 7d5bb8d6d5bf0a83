"""Batched decoding with key-value caches: one token per step for each of many sequences.

A group's prompt is cached once; each sequence has its own cache for the tokens it generated. Sequences that end can be
removed at any step, and new groups can join.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo.model.cpu.kernels import supports
from grpo.model.cpu.limits import INITIAL_CACHE_TOKENS
from grpo.model.decode import recorded
from grpo.model.decode.cache import Cache
from grpo.model.decode.step_rows import StepRows
from grpo.model.fused.decode_step import DecodeStep, can_decode
from grpo.model.lm_head import Head, backbone_of
from grpo.model.packed.attention import Packed, hidden_states, is_unfused
from grpo.model.packed.packing import pack
from grpo.model.packed.scores import ScoreOptions
from grpo.model.packed.transfer import to_device
from grpo.model.rope import reset_rope


class Decoder:
    """The sequences in the batch: rows 0 to n - 1, in groups 0 to g - 1."""

    def __init__(self, model: Any, packed_rows: int = 0):
        """`packed_rows`: see `prepacked_rows` of `grpo.model.fused.decode_step.DecodeStep`."""
        self.backbone, self.head = backbone_of(model), Head(model).for_decoding()
        reset_rope(self.backbone)
        self.device = next(model.parameters()).device
        self.fused = not is_unfused(self.backbone)
        self._decode_step: DecodeStep | None = None
        if self.head.scale == 1 and can_decode(self.backbone, self.head.linear):
            self._decode_step = DecodeStep(self.backbone, self.head.linear, packed_rows)
        self.caches: dict[int, Cache] = {}
        self.prompt_lengths: list[int] = []  # of the groups
        self.group_of: list[int] = []  # of the rows
        self.generated = torch.zeros(0, dtype=torch.long, device=self.device)  # tokens of each row so far
        # The same on the host, which must not wait for a GPU: the number of steps, and the step at which each row
        # joined.
        self.steps, self.joined = 0, list[int]()
        self._batch: StepRows | None = None
        self._records = self._decode_step is None and recorded.can_record(self.backbone, self.device)
        self._graph_memory = recorded.GraphMemory()
        self._replay: Callable[[], Tensor] | None = None  # a recorded step of this batch, which reads `_ids`
        self._ids = self.generated
        self.prompt_ends: list[int] = []  # index in the pack of each last-added prompt's last token

    def add_groups(self, prompts: Sequence[Sequence[int]], size: int) -> Tensor:
        """Appends a group of `size` rows for each prompt. Returns the logits after each prompt, [g, V]."""
        packed = pack(prompts, [[] for _ in prompts], self.device, unfused=not self.fused)
        layout = _Prefill(packed.attention)
        hidden = hidden_states(self.backbone, packed.ids, packed.positions, layout)
        self.prompt_ends = packed.last
        first, width = len(self.prompt_lengths), max(map(len, prompts))
        # Shorter prompts are padded with arbitrary tokens, which are masked.
        index = [
            [*range(end - len(prompt) + 1, end + 1), *([end] * (width - len(prompt)))]
            for prompt, end in zip(prompts, packed.last, strict=True)
        ]
        places = self._there(index)
        self.prompt_lengths += map(len, prompts)
        self.group_of += [first + number for number in range(len(prompts)) for _ in range(size)]
        self.joined += [self.steps] * (len(prompts) * size)
        self.generated = torch.cat([self.generated, self.generated.new_zeros(len(prompts) * size)])
        for layer, (keys, values) in layout.kept.items():
            shared = keys[places].transpose(1, 2), values[places].transpose(1, 2)
            self.caches.setdefault(layer, Cache(shared[0])).add_prompts(first, *shared)
        self._batch = None
        return self.head(hidden.index_select(0, self._there(packed.last)))

    def step(self, tokens: Tensor) -> Tensor:
        """Appends tokens [n], one per row. Returns the logits of the next token, [n, V]."""
        if self._batch is None:
            cache = next(iter(self.caches.values()))
            like = cache.rows[0]
            uses_kernel = self.fused and supports(like)
            counts = [self.steps - joined for joined in self.joined]
            shape = self.prompt_lengths, self.group_of, self.generated, counts
            self._batch = StepRows.of(*shape, like.dtype, uses_kernel)
            self._replay, self._ids = None, tokens.to(self.device, copy=True)
        else:
            self._ids.copy_(tokens)
        logits = self._recorded_step(self._batch) if self._records else self._step()
        self.steps += 1
        return logits

    def _step(self) -> Tensor:
        assert self._batch is not None
        self._batch.begin()
        ids, positions = self._ids, self._batch.row_prompt_lengths + self.generated
        if self._decode_step is not None:
            logits = self._decode_step(ids, positions, self.attend)
        else:
            logits = self.head(hidden_states(self.backbone, ids[None], positions[None], self))
        self.generated += 1
        return logits

    def _recorded_step(self, batch: StepRows) -> Tensor:
        """`_step`, replayed from the third step of a batch on: recording costs about as much as two steps."""
        longest = self.steps - min(self.joined) + 1
        if batch.capacity is None or longest > batch.capacity:
            batch.capacity = max(INITIAL_CACHE_TOKENS, 1 << (longest - 1).bit_length())
            self._replay = None
            return self._step()
        if self._replay is None:
            self._replay = recorded.record(self._step, self.device, self._graph_memory, self.backbone)
            self._records = self._replay is not None
        return self._step() if self._replay is None else self._replay()

    def remove(self, rows: Sequence[int]) -> list[int]:
        """Removes rows that have ended; the last rows fill the gaps. Returns the old index of each remaining row."""
        longest = self.steps - min(self.joined)
        kept = _fill_gaps(len(self.generated), set(rows))
        groups = _fill_gaps(
            len(self.prompt_lengths), set(range(len(self.prompt_lengths))) - {self.group_of[r] for r in kept}
        )
        for cache in self.caches.values():
            cache.keep(kept, groups, longest)
        renamed = {old: new for new, old in enumerate(groups)}
        self.prompt_lengths = [self.prompt_lengths[group] for group in groups]
        self.group_of = [renamed[self.group_of[row]] for row in kept]
        self.joined = [self.joined[row] for row in kept]
        self.generated = self.generated.index_select(0, self._there(kept))
        self._batch = None
        return kept

    def _there(self, values: list[Any]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.long), self.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> Tensor:
        assert self._batch is not None
        cache, batch = self.caches[layer], self._batch
        cache.reserve(len(q), batch.width)
        longest = batch.prompt_width + batch.width
        if options.is_plain(longest):
            return batch.attend(cache, q, k, v, options.scale)
        return batch.attend_masked(cache, q, k, v, options, options.window_in(longest))


class _Prefill:
    """Layout of prompts that also keeps their keys and values, [N, Hkv, D] per layer."""

    def __init__(self, inner: Packed):
        self.inner = inner
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> Tensor:
        self.kept[layer] = (k, v)
        return self.inner.attend(layer, q, k, v, options)


def _fill_gaps(count: int, gone: set[int]) -> list[int]:
    """Old index of each remaining element, after the last ones have filled the gaps left by `gone`."""
    left = count - len(gone)
    movers = iter(place for place in range(left, count) if place not in gone)
    return [next(movers) if place in gone else place for place in range(left)]
