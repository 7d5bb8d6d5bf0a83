"""Sampling completions from a policy in the training process.

Prompts are left-padded; a prompt is computed once for its whole group; finished sequences leave the batch, so that
the slowest completion does not hold the others' memory and time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from grpo.config import Sampling
from grpo.logprobs import pad


@dataclass
class Completion:
    """`tokens` includes the end mark where the policy set one; `logprobs` are those of the sampling distribution
    before the nucleus cut, at the sampling temperature."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool


def generator_for(seed: int, *parts: int) -> torch.Generator:
    """A stream of its own for (seed, step, batch...): what was sampled before does not move it, so a resumed run
    samples what an undisturbed one would have."""
    mixed = seed
    for part in parts:
        mixed = (mixed * 1_000_003 + part + 1) % (2**63 - 1)
    return torch.Generator().manual_seed(mixed)


def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    per_prompt: int,
    settings: Sampling,
    *,
    pad_id: int,
    eos_id: int,
    generator: torch.Generator,
) -> list[list[Completion]]:
    """`per_prompt` completions for each of `prompts` (token ids), in their order."""
    groups = dict(
        sample_batches(model, prompts, per_prompt, settings, pad_id=pad_id, eos_id=eos_id, generator=generator)
    )
    return [groups[i] for i in range(len(prompts))]


def sample_batches(
    model: Any,
    prompts: Sequence[Sequence[int]],
    per_prompt: int,
    settings: Sampling,
    *,
    pad_id: int,
    eos_id: int,
    generator: torch.Generator,
) -> Iterator[tuple[int, list[Completion]]]:
    """As `sample`, but each prompt's index and completions as soon as their batch is done, so that a caller can go on
    with them while the next batch is sampled."""
    # Prompts of like length share a batch: less padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    at_once = max(1, settings.batch_size // per_prompt)
    for start in range(0, len(order), at_once):
        chosen = order[start : start + at_once]
        flat = _sample_batch(model, [prompts[i] for i in chosen], per_prompt, settings, pad_id, eos_id, generator)
        for position, index in enumerate(chosen):
            yield index, flat[position * per_prompt : (position + 1) * per_prompt]


@torch.inference_mode()
def _sample_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    per_prompt: int,
    settings: Sampling,
    pad_id: int,
    eos_id: int,
    generator: torch.Generator,
) -> list[Completion]:
    device = next(model.parameters()).device
    ids = pad(prompts, pad_id, left=True).to(device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    attention = (torch.arange(ids.shape[1], device=device) >= ids.shape[1] - lengths[:, None]).long()
    cache = DynamicCache(config=model.config)
    output = model(
        input_ids=ids,
        attention_mask=attention,
        position_ids=(attention.cumsum(1) - 1).clamp(min=0),
        past_key_values=cache,
        logits_to_keep=1,
    )
    cache.batch_repeat_interleave(per_prompt)
    logits = output.logits[:, -1].repeat_interleave(per_prompt, 0)
    attention = attention.repeat_interleave(per_prompt, 0)
    position = lengths.repeat_interleave(per_prompt, 0)

    count = len(prompts) * per_prompt
    tokens = torch.full((count, settings.max_new_tokens), pad_id)
    logprobs = torch.zeros(count, settings.max_new_tokens)
    ends = torch.full((count,), settings.max_new_tokens)
    finished = torch.zeros(count, dtype=torch.bool)
    rows = torch.arange(count)  # which completion each sequence of the shrinking batch belongs to
    for step in range(settings.max_new_tokens):
        token, logprob = choose(logits.float().cpu(), settings, generator)
        tokens[rows, step], logprobs[rows, step] = token, logprob
        ended = token == eos_id
        ends[rows[ended]], finished[rows[ended]] = step + 1, True
        if ended.all() or step + 1 == settings.max_new_tokens:
            break
        attention = torch.cat([attention, attention.new_ones(len(attention), 1)], 1)
        if ended.any():
            keep = (~ended).nonzero().squeeze(1)
            rows, token = rows[keep], token[keep]
            kept = keep.to(device)
            cache.batch_select_indices(kept)
            attention, position = attention[kept], position[kept]
        output = model(
            input_ids=token[:, None].to(device),
            attention_mask=attention,
            position_ids=position[:, None],
            past_key_values=cache,
        )
        logits, position = output.logits[:, -1], position + 1
    return [
        Completion(t[:end].tolist(), p[:end].tolist(), bool(f))
        for t, p, end, f in zip(tokens, logprobs, ends.tolist(), finished, strict=True)
    ]


def choose(logits: Tensor, settings: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one token a row from [B, V] logits. Returns tokens [B] and their log-probabilities [B] before top-p."""
    logprobs = torch.log_softmax(logits / settings.temperature, -1)
    probabilities = logprobs.exp()
    if settings.top_p < 1:
        descending, order = probabilities.sort(-1, descending=True)
        # A token stays if the mass before it is below top_p, so the most probable one always stays.
        outside = descending.cumsum(-1) - descending >= settings.top_p
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, descending.masked_fill(outside, 0))
    token = torch.multinomial(probabilities, 1, generator=generator)
    return token.squeeze(1), logprobs.gather(1, token).squeeze(1)
