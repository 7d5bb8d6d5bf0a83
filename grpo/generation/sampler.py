"""Sampling completions from a policy in the training process.

Each completion has random numbers of its own: it does not depend on the rest of its batch, on the number of processes
that share the prompts, or on what was sampled before.
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
"""Most probable tokens that top-p considers first; all are sorted only where their mass is too small."""


class _Rows:
    """The unfinished completions, one a row of each table, and the random numbers of their tokens."""

    def __init__(self, length: int):
        self.owners: list[tuple[int, int]] = []  # (prompt, number of its completion)
        self.counts = torch.zeros(0, 1, dtype=torch.long)  # tokens so far
        self.uniforms = torch.zeros(0, length, dtype=torch.float64)  # uniform random numbers, one a token
        self.tokens = torch.zeros(0, length, dtype=torch.long)
        self.logprobs = torch.zeros(0, length)

    def join(self, prompts: Sequence[int], size: int, seeds: Sequence[int]) -> None:
        length = self.tokens.shape[1]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        drawn = [torch.rand(size, length, dtype=torch.float64, generator=generator) for generator in generators]
        self.owners += [(prompt, number) for prompt in prompts for number in range(size)]
        self.uniforms = torch.cat([self.uniforms, *drawn])
        self.counts, self.tokens, self.logprobs = (
            torch.cat([table, table.new_zeros(len(prompts) * size, table.shape[1])])
            for table in (self.counts, self.tokens, self.logprobs)
        )

    def draw(self, logits: Tensor, settings: Sampling, fused: bool) -> Tensor:
        """The next token of each row, [n], from logits [n, V]."""
        uniforms = self.uniforms.gather(1, self.counts).squeeze(1)
        tokens, logprobs = draw_tokens(logits, settings, uniforms, fused=fused)
        self.tokens.scatter_(1, self.counts, tokens[:, None])
        self.logprobs.scatter_(1, self.counts, logprobs[:, None])
        self.counts += 1
        return tokens

    def ended(self, eos_id: int) -> list[int]:
        """Rows owners last token is the end token, or that have reached the maximum length."""
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
        self.owners = [self.owners[row] for row in rows]
        index = torch.tensor(rows, dtype=torch.long)
        self.counts, self.uniforms, self.tokens, self.logprobs = (
            table.index_select(0, index) for table in (self.counts, self.uniforms, self.tokens, self.logprobs)
        )


def seed_of(seed: int, *parts: int) -> int:
    """A seed for (seed, step, prompt, ...)."""
    mixed = seed
    for part in parts:
        mixed = (mixed * 1_000_003 + part + 1) % (2**63 - 1)
    return mixed


def generator_for(seed: int, *parts: int) -> torch.Generator:
    """A generator seeded by `seed_of`."""
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
    """Like `sample`, but yields each prompt's index and completions as soon as the last of them has ended, so that a
    caller can use them while others are sampled."""
    rows = max(per_prompt, min(settings.batch_size, len(prompts) * per_prompt))
    packs = is_worth_prepacking(rows, settings.max_new_tokens)
    if packs:  # give memory that an update has freed back before the copies take more
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
    while waiting or rows.owners:
        joining: list[int] = []
        count = len(rows.owners)
        while waiting and ((len(joining) + 1) * per_prompt + count <= settings.batch_size or not (joining or count)):
            joining.append(waiting.popleft())
        if joining:
            prompt_logits = decoder.add_groups([prompts[i] for i in joining], per_prompt).repeat_interleave(
                per_prompt, 0
            )
            logits = prompt_logits if logits is None else torch.cat([logits, prompt_logits])
            rows.join(joining, per_prompt, [seeds[i] for i in joining])
        assert logits is not None
        tokens = rows.draw(logits.float().cpu(), settings, decoder.fused)
        if ended_rows := rows.ended(eos_id):
            remaining = decoder.remove(ended_rows)
            for row, completion in zip(ended_rows, rows.completions(ended_rows, eos_id), strict=True):
                prompt, number = rows.owners[row]
                ended[prompt][number] = completion
                if len(ended[prompt]) == per_prompt:
                    yield prompt, [ended[prompt][i] for i in range(per_prompt)]
            rows.keep(remaining)
            tokens = tokens[remaining]
        logits = decoder.step(tokens) if rows.owners else None


def draw_tokens(logits: Tensor, settings: Sampling, uniforms: Tensor, *, fused: bool = True) -> tuple[Tensor, Tensor]:
    """One token a row from logits [B, V], by inverse transform sampling with `uniforms` [B] in [0, 1).

    Returns tokens [B] and their log-probabilities [B] before top-p. `fused`: by a CPU kernel where there is one.
    """
    if settings.temperature != 1:
        logits = logits / settings.temperature
    if settings.top_p == 1 and fused and supports(logits):
        return sample_tokens(logits, uniforms)
    largest = logits.amax(1, keepdim=True)
    masses, order = (logits - largest).exp_(), None
    total = masses.sum(1, keepdim=True)
    if settings.top_p < 1:
        masses, order = _nucleus(masses, settings.top_p * total)
    index = _inverse_cdf(masses, uniforms[:, None])
    token = index if order is None else order.gather(1, index)
    return token.squeeze(1), (logits.gather(1, token) - largest - total.log()).squeeze(1)


def _inverse_cdf(masses: Tensor, uniforms: Tensor) -> Tensor:
    """Index [B, 1] of the first entry of each row [B, V] up to which the share of the mass exceeds `uniforms` [B, 1].

    First the block of entries, then the entry, so that the cumulative sums of a whole row are never stored.
    """
    rows, count = masses.shape
    size = 1 << count.bit_length() // 2  # near the square root of the count
    missing = -count % size
    blocks = (pad(masses, (0, missing)) if missing else masses).view(rows, -1, size)
    of_block = blocks.sum(2)
    up_to_block = of_block.cumsum(1, dtype=torch.float64)
    threshold = uniforms * up_to_block[:, -1:]
    block = _first_above(up_to_block, threshold)
    before = up_to_block.gather(1, block) - of_block.gather(1, block)
    entries = blocks.gather(1, block[:, :, None].expand(-1, -1, size)).squeeze(1)
    return block * size + _first_above(entries.cumsum(1, dtype=torch.float64), threshold - before)


def _first_above(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Index of each row's first entry above its threshold; never past the last entry of positive mass."""
    index = torch.searchsorted(cumulative, threshold, right=True)
    return torch.minimum(index, torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()))


def _nucleus(masses: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Masses of the most probable tokens that together hold `kept` [B, 1], descending, others 0; and their tokens."""
    descending, order = masses.topk(min(CANDIDATES, masses.shape[1]))
    if (descending.sum(1, keepdim=True) < kept).any():
        descending, order = masses.sort(1, descending=True)
    # A token stays if the mass before it is below the share kept, so the most probable one always stays.
    outside = descending.cumsum(1) - descending >= kept
    return descending.masked_fill(outside, 0), order
