"""Sampling completions from a policy in the training process.

Each completion draws from random numbers of its own: what it says does not depend on who shares its batch, how many
processes divide the prompts among them, or what was sampled before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo import freed_memory
from grpo.config import Sampling
from grpo.decoding import Decoder
from grpo.few_rows import pays

CANDIDATES = 1024
"""Most probable tokens that top-p looks at first; only where they do not hold its mass are all sorted."""


@dataclass
class Completion:
    """`tokens` includes the end mark where the policy set one; `logprobs` are those of the sampling distribution
    before the nucleus cut, at the sampling temperature."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool


@dataclass
class _Row:
    """A completion that is being written, and the uniform random numbers that choose its tokens."""

    prompt: int
    number: int
    chances: list[float]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


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
    packs = pays(rows, settings.max_new_tokens)
    if packs:  # what comes on top of all else should not come on top of what an update has left free
        freed_memory.give_back()
    decoder = Decoder(model, packed_rows=rows if packs else 0)
    yield from _sample(decoder, prompts, per_prompt, settings, eos_id, seeds)
    if packs:
        del decoder
        freed_memory.give_back()


def _sample(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    per_prompt: int,
    settings: Sampling,
    eos_id: int,
    seeds: Sequence[int],
) -> Iterator[tuple[int, list[Completion]]]:
    waiting = deque(sorted(range(len(prompts)), key=lambda i: -len(prompts[i])))
    rows, logits = list[_Row](), None
    ended: dict[int, list[_Row]] = {i: [] for i in waiting}
    while waiting or rows:
        joining: list[int] = []
        while waiting and (
            len(joining) * per_prompt + len(rows) + per_prompt <= settings.batch_size or not (joining or rows)
        ):
            joining.append(waiting.popleft())
        if joining:
            after_prompts = decoder.join([prompts[i] for i in joining], per_prompt).repeat_interleave(per_prompt, 0)
            logits = after_prompts if logits is None else torch.cat([logits, after_prompts])
            rows += [row for i in joining for row in _rows(i, per_prompt, settings.max_new_tokens, seeds[i])]
        assert logits is not None
        chances = torch.tensor([row.chances[len(row.tokens)] for row in rows], dtype=torch.float64)
        chosen, logprobs = choose(logits.float().cpu(), settings, chances)
        gone = []
        for place, (row, token, logprob) in enumerate(zip(rows, chosen.tolist(), logprobs.tolist(), strict=True)):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.finished = token == eos_id
            if row.finished or len(row.tokens) == len(row.chances):
                gone.append(place)
        left = decoder.leave(gone) if gone else range(len(rows))
        for place in gone:
            of_prompt = ended[rows[place].prompt]
            of_prompt.append(rows[place])
            if len(of_prompt) == per_prompt:
                of_prompt.sort(key=lambda row: row.number)
                yield rows[place].prompt, [Completion(row.tokens, row.logprobs, row.finished) for row in of_prompt]
        rows = [rows[place] for place in left]
        logits = decoder.step([row.tokens[-1] for row in rows]) if rows else None


def _rows(prompt: int, count: int, length: int, seed: int) -> list[_Row]:
    chances = torch.rand(count, length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return [_Row(prompt, number, row) for number, row in enumerate(chances.tolist())]


def choose(logits: Tensor, settings: Sampling, chances: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row from [B, V] logits, where the uniform numbers `chances` [B] fall in the distribution.

    Returns tokens [B] and their log-probabilities [B] before top-p.
    """
    if settings.temperature != 1:
        logits = logits / settings.temperature
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
    size = 1 << masses.shape[1].bit_length() // 2  # near the root: about as many blocks as entries in one
    blocks = pad(masses, (0, -masses.shape[1] % size)).unflatten(1, (-1, size))
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
