"""Sampling by transformers' own `generate`, for models that cannot decode packed (`grpo.model.probe`).

Draws the same completions as `grpo.generation.sampler` would, up to rounding: each has its own random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from grpo.config.common import Sampling
from grpo.data.completions import Completion, Ends, each_end
from grpo.generation.draw_tokens import draw_tokens, drawing_device, uniforms_of
from grpo.model.decoding import to_device
from grpo.model.lm_head import base_of
from grpo.model.plain import generate, generates_alone


def sample_groups_plain(
    model: Any,
    prompts: Sequence[Sequence[int]],
    per_prompt: int,
    settings: Sampling,
    *,
    eos_id: Ends,
    seeds: Sequence[int],
) -> Iterator[tuple[int, list[Completion]]]:
    """Like `grpo.generation.sampler.sample_groups`. Each `generate` call holds prompts of equal length, so that none is
    padded, or one prompt if that is what the model's `generate` is right for."""
    by_length = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    at_once = max(1, settings.batch_size // per_prompt)
    for _, same_length in groupby(by_length, key=lambda i: len(prompts[i])):
        numbers = [*same_length]
        for start in range(0, len(numbers), at_once):
            batch = numbers[start : start + at_once]
            ids = torch.tensor([[*prompts[i]] for i in batch], device=model.device).repeat_interleave(per_prompt, 0)
            uniforms = uniforms_of([seeds[i] for i in batch], per_prompt, settings.max_new_tokens)
            rows = 1 if generates_alone(model) else len(ids)
            parts = zip(ids.split(rows), uniforms.split(rows), strict=True)
            completions = [c for part in parts for c in _sample(base_of(model), part[0], settings, eos_id, part[1])]
            for place, number in enumerate(batch):
                yield number, completions[place * per_prompt : (place + 1) * per_prompt]


def _sample(model: Any, prompts: Tensor, settings: Sampling, eos_id: Ends, uniforms: Tensor) -> list[Completion]:
    """One completion for each of B prompts [B, P]. `uniforms` [B, T]: the random numbers that draw its tokens."""
    drawn_logprobs: list[Tensor] = []
    uniforms = to_device(uniforms, drawing_device(prompts.device))

    def draw(logits: Tensor) -> Tensor:
        of_step = uniforms[:, len(drawn_logprobs)]
        tokens, logprobs = draw_tokens(logits.to(of_step.device), settings, of_step, fused=False)
        drawn_logprobs.append(logprobs)
        return tokens

    rows = generate(model, prompts, settings.max_new_tokens, eos_id, draw).tolist()
    logprobs = torch.stack(drawn_logprobs, 1).tolist()
    return [completion_of(*row, eos_id) for row in zip(rows, logprobs, strict=True)]


def completion_of(tokens: list[int], logprobs: list[float], eos_id: Ends) -> Completion:
    """The completion at the start of `tokens`, up to the first end token."""
    ends = each_end(eos_id)
    count = next((place + 1 for place, token in enumerate(tokens) if token in ends), None)
    return Completion(tokens[:count], logprobs[:count], count is not None)
