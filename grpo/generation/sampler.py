"""Sampling completions from a policy in the training process.

Each completion draws from random numbers of its own: what it says does not depend on who shares its batch, how many
processes divide the prompts among them, or what was sampled before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo.config.common import Sampling
from grpo.data.completions import Completion
from grpo.generation.decoder import Decoder
from grpo.model.decoding import is_worth_prepacking, sample_tokens, supports
from grpo.processes import malloc

CANDIDATES = 1024
"""Most probable tokens that top-p looks at first; only where they do not hold its mass are all sorted."""


class _Rows:
    """The completions that are being written, one a row of each table, and what they will draw."""

    def __init__(self, length: int):
        self.whose: list[tuple[int, int]] = []  # which prompt, and which of its completions
        self.counts = torch.zeros(0, 1, dtype=torch.long)  # tokens so far
        self.chances = torch.zeros(0, length, dtype=torch.float64)  # uniform random numbers that choose the tokens
        self.tokens = torch.zeros(0, length, dtype=torch.long)
        self.logprobs = torch.zeros(0, length)

    def join(self, prompts: Sequence[int], size: int, seeds: Sequence[int]) -> None:
        length = self.tokens.shape[1]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        drawn = [torch.rand(size, length, dtype=torch.float64, generator=generator) for generator in generators]
        self.whose += [(prompt, number) for prompt in prompts for number in range(size)]
        self.chances = torch.cat([self.chances, *drawn])
        self.counts, self.tokens, self.logprobs = (
            torch.cat([table, table.new_zeros(len(prompts) * size, table.shape[1])])
            for table in (self.counts, self.tokens, self.logprobs)
        )

    def draw(self, logits: Tensor, settings: Sampling) -> Tensor:
        """The next token of each, [n], from logits [n, V]."""
        tokens, logprobs = choose(logits, settings, self.chances.gather(1, self.counts).squeeze(1))
        self.tokens.scatter_(1, self.counts, tokens[:, None])
        self.logprobs.scatter_(1, self.counts, logprobs[:, None])
        self.counts += 1
        return tokens

    def ended(self, eos_id: int) -> list[int]:
        """Rows whose last token was the end mark, or the last that there was room for."""
        ended = (self.tokens.gather(1, self.counts - 1) == eos_id) | (self.counts == self.tokens.shape[1])
        return ended.flatten().nonzero().flatten().tolist()

    def completions(self, rows: list[int], eos_id: int) -> list[Completion]:
        index = torch.tensor(rows, dtype=torch.long)
        chosen = (table[index].tolist() for table in (self.counts.squeeze(1), self.tokens, self.logprobs))
        return [
            Completion(tokens[:count], logprobs[:count], tokens[count - 1] == eos_id)
            for count, tokens, logprobs in zip(*chosen, strict=True)
        ]

    def keep(self, rows: list[int]) -> None:
        self.whose = [self.whose[row] for row in rows]
        index = torch.tensor(rows, dtype=torch.long)
        self.counts, self.chances, self.tokens, self.logprobs = (
            table.index_select(0, index) for table in (self.counts, self.chances, self.tokens, self.logprobs)
        )


def seed_of(seed: int, *parts: int) -> int:
    """A seed of its own for (seed, step, prompt...)."""
    mixed = seed
    for part in parts:
        mixed = (mixed * 1_000_003 + part + 1) % (2**63 - 1)
    return mixed


def generator_for(seed: int, *parts: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(seed, *parts))


def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    per_prompt: int,
    settings: Sampling,
    *,
    eos_id: int,
    seeds: Sequence[int],
) -> list[list[Completion]]:
    """`per_prompt` completions for each of `prompts` (token ids), in their order; `seeds`: one for each prompt."""
    groups = dict(sample_groups(model, prompts, per_prompt, settings, eos_id=eos_id, seeds=seeds))
    return [groups[i] for i in range(len(prompts))]


@torch.inference_mode()
def sample_groups(
    model: Any,
    prompts: Sequence[Sequence[int]],
    per_prompt: int,
    settings: Sampling,
    *,
    eos_id: int,
    seeds: Sequence[int],
) -> Iterator[tuple[int, list[Completion]]]:
    """As `sample`, but each prompt's index and completions as soon as the last of them has ended, so that a caller can
    go on with them while others are sampled."""
    rows = max(per_prompt, min(settings.batch_size, len(prompts) * per_prompt))
    packs = is_worth_prepacking(rows, settings.max_new_tokens)
    if packs:  # what comes on top of all else should not come on top of what an update has left free
        malloc.trim()
    decoder = Decoder(model, packed_rows=rows if packs else 0)
    yield from _sample(decoder, prompts, per_prompt, settings, eos_id, seeds)
    if packs:
        del decoder
        malloc.trim()


def _sample(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    per_prompt: int,
    settings: Sampling,
    eos_id: int,
    seeds: Sequence[int],
) -> Iterator[tuple[int, list[Completion]]]:
    waiting = deque(sorted(range(len(prompts)), key=lambda i: -len(prompts[i])))
    rows, logits = _Rows(settings.max_new_tokens), None
    ended: dict[int, dict[int, Completion]] = {i: {} for i in waiting}
    while waiting or rows.whose:
        joining: list[int] = []
        count = len(rows.whose)
        while waiting and ((len(joining) + 1) * per_prompt + count <= settings.batch_size or not (joining or count)):
            joining.append(waiting.popleft())
        if joining:
            after_prompts = decoder.join([prompts[i] for i in joining], per_prompt).repeat_interleave(per_prompt, 0)
            logits = after_prompts if logits is None else torch.cat([logits, after_prompts])
            rows.join(joining, per_prompt, [seeds[i] for i in joining])
        assert logits is not None
        tokens = rows.draw(logits.float().cpu(), settings)
        if gone := rows.ended(eos_id):
            left = decoder.leave(gone)
            for row, completion in zip(gone, rows.completions(gone, eos_id), strict=True):
                prompt, number = rows.whose[row]
                ended[prompt][number] = completion
                if len(ended[prompt]) == per_prompt:
                    yield prompt, [ended[prompt][i] for i in range(per_prompt)]
            rows.keep(left)
            tokens = tokens[left]
        logits = decoder.step(tokens) if rows.whose else None


def choose(logits: Tensor, settings: Sampling, chances: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row from [B, V] logits, where the uniform numbers `chances` [B] fall in the distribution.

    Returns tokens [B] and their log-probabilities [B] before top-p.
    """
    if settings.temperature != 1:
        logits = logits / settings.temperature
    if settings.top_p == 1 and supports(logits):
        return sample_tokens(logits, chances)
    largest = logits.amax(1, keepdim=True)
    masses, order = (logits - largest).exp_(), None
    total = masses.sum(1, keepdim=True)
    if settings.top_p < 1:
        masses, order = _nucleus(masses, settings.top_p * total)
    place = _where_chance_falls(masses, chances[:, None])
    token = place if order is None else order.gather(1, place)
    return token.squeeze(1), (logits.gather(1, token) - largest - total.log()).squeeze(1)


def _where_chance_falls(masses: Tensor, chances: Tensor) -> Tensor:
    """[B, 1] of the first entry with more than the share `chances` [B, 1] of its row's mass up to it, of [B, V].

    First the block of entries, then the entry, so that sums over the vocabulary are read once and not kept.
    """
    rows, count = masses.shape
    size = 1 << count.bit_length() // 2  # near the root: about as many blocks as entries in one
    missing = -count % size
    blocks = (pad(masses, (0, missing)) if missing else masses).view(rows, -1, size)
    of_block = blocks.sum(2)
    up_to_block = of_block.cumsum(1, dtype=torch.float64)
    sought = chances * up_to_block[:, -1:]
    block = _first_beyond(up_to_block, sought)
    before = up_to_block.gather(1, block) - of_block.gather(1, block)
    entries = blocks.gather(1, block[:, :, None].expand(-1, -1, size)).squeeze(1)
    return block * size + _first_beyond(entries.cumsum(1, dtype=torch.float64), sought - before)


def _first_beyond(rising: Tensor, sought: Tensor) -> Tensor:
    """Where each row first exceeds what is sought; rounding never leads past the last entry that adds something."""
    found = torch.searchsorted(rising, sought, right=True)
    return torch.minimum(found, torch.searchsorted(rising, rising[:, -1:].contiguous()))


def _nucleus(masses: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable tokens that hold the mass `kept` [B, 1], in falling order, others at 0; and which they are."""
    descending, order = masses.topk(min(CANDIDATES, masses.shape[1]))
    if (descending.sum(1, keepdim=True) < kept).any():
        descending, order = masses.sort(1, descending=True)
    # A token stays if the mass before it is below the share kept, so the most probable one always stays.
    outside = descending.cumsum(1) - descending >= kept
    return descending.masked_fill(outside, 0), order
