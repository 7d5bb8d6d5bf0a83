"""Sampling completions from a policy in the training process.

Each completion has its own random numbers. It does not depend on the rest of its batch, on the number of processes that
share the prompts, or on what was sampled before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo.config.common import Sampling
from grpo.data.completions import Completion, Ends, each_end
from grpo.generation.chosen_experts import ChosenExperts
from grpo.generation.draw_tokens import draw_tokens, drawing_device, uniforms_of
from grpo.generation.plain_sampler import completion_of, sample_groups_plain
from grpo.model.decoder import Decoder
from grpo.model.decoding import is_worth_prepacking, to_device
from grpo.model.loading import decodes_packed, plain_attention
from grpo.model.packed.packing import PASS_TOKENS
from grpo.processes import malloc

LOOKS = {"cpu": 1}
"""Steps between checks for completions that have ended, by device type."""
STEPS_BETWEEN_LOOKS = 8
"""The same for all other devices, where the host must wait for the result of a check. Between checks ended completions
continue, and tokens after their end are dropped."""
LEAST_ENDED = {"cpu": 0.0}
"""Share of the rows that must have ended before they are removed, by device type."""
LEAST_ENDED_RECORDED = 0.25
"""The same for all other devices, where each removal changes the shapes of a step, which is then recorded again
(`grpo.model.decode.recorded`)."""


class _Rows:
    """The unfinished completions, one per row of each table, and the random numbers of their tokens.

    The tables are on the device of the logits. Only which rows have ended is copied to the host, every few steps.
    """

    def __init__(self, length: int, device: torch.device):
        self.device = device
        self.between_looks = LOOKS.get(device.type, STEPS_BETWEEN_LOOKS)
        self.least_ended = LEAST_ENDED.get(device.type, LEAST_ENDED_RECORDED)
        self.step, self.joined = 0, list[int]()  # steps so far; for each row the step at which it joined
        self.with_end = torch.zeros(0, dtype=torch.bool, device=device)  # rows that have drawn an end token
        self.owners: list[tuple[int, int]] = []  # (prompt, number of its completion)
        self.counts = torch.zeros(0, 1, dtype=torch.long, device=device)  # tokens so far
        self.uniforms = torch.zeros(0, length, dtype=torch.float64, device=device)  # one per token, in [0, 1)
        self.tokens = torch.zeros(0, length, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(0, length, device=device)

    def join(self, prompts: Sequence[int], size: int, seeds: Sequence[int]) -> None:
        length = self.tokens.shape[1]
        self.owners += [(prompt, number) for prompt in prompts for number in range(size)]
        self.joined += [self.step] * (len(prompts) * size)
        self.uniforms = torch.cat([self.uniforms, to_device(uniforms_of(seeds, size, length), self.device)])
        self.counts, self.tokens, self.logprobs, self.with_end = (
            torch.cat([table, table.new_zeros(len(prompts) * size, *table.shape[1:])])
            for table in (self.counts, self.tokens, self.logprobs, self.with_end)
        )

    def draw(self, logits: Tensor, settings: Sampling, fused: bool) -> Tensor:
        """The next token of each row, [n], from logits [n, V]."""
        uniforms = self.uniforms.gather(1, self.counts).squeeze(1)
        tokens, logprobs = draw_tokens(logits, settings, uniforms, fused=fused)
        self.tokens.scatter_(1, self.counts, tokens[:, None])
        self.logprobs.scatter_(1, self.counts, logprobs[:, None])
        self.counts += 1
        self.step += 1
        return tokens

    def ended(self, eos_id: Ends) -> list[int]:
        """Rows that have drawn an end token or reached the maximum length; empty between two checks, and while they
        are too few to be removed."""
        drawn = self.tokens.gather(1, self.counts - 1).squeeze(1)
        for end in each_end(eos_id):
            self.with_end |= drawn == end
        length = self.tokens.shape[1]
        if self.step % self.between_looks and self.step - min(self.joined) < length:
            return []
        ended = self.with_end.tolist()
        full = [self.step - joined == length for joined in self.joined]
        rows = [row for row in range(len(ended)) if ended[row] or full[row]]
        return rows if any(full) or len(rows) >= self.least_ended * len(ended) else []

    def completions(self, rows: list[int], eos_id: Ends) -> list[Completion]:
        tokens, logprobs = (self._of(rows, table).tolist() for table in (self.tokens, self.logprobs))
        counts = [self.step - self.joined[row] for row in rows]
        return [
            completion_of(of_row[:count], row_logprobs[:count], eos_id)
            for count, of_row, row_logprobs in zip(counts, tokens, logprobs, strict=True)
        ]

    def keep(self, rows: list[int]) -> None:
        self.owners, self.joined = [self.owners[row] for row in rows], [self.joined[row] for row in rows]
        self.counts, self.uniforms, self.tokens, self.logprobs, self.with_end = (
            self._of(rows, table) for table in (self.counts, self.uniforms, self.tokens, self.logprobs, self.with_end)
        )

    def _of(self, rows: list[int], table: Tensor) -> Tensor:
        return table.index_select(0, to_device(torch.tensor(rows, dtype=torch.long), self.device))


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
    eos_id: Ends,
    seeds: Sequence[int],
) -> list[list[Completion]]:
    """Returns `per_prompt` completions for each of `prompts` (token ids), in order. `seeds`: one per prompt."""
    groups = dict(sample_groups(model, prompts, per_prompt, settings, eos_id=eos_id, seeds=seeds))
    return [groups[i] for i in range(len(prompts))]


@torch.inference_mode()
def sample_groups(
    model: Any,
    prompts: Sequence[Sequence[int]],
    per_prompt: int,
    settings: Sampling,
    *,
    eos_id: Ends,
    seeds: Sequence[int],
) -> Iterator[tuple[int, list[Completion]]]:
    """Like `sample`, but yields each prompt's index and completions as soon as its last one has ended, so that a caller
    can use them while others are being sampled."""
    if not decodes_packed(model, max(map(len, prompts), default=0) + settings.max_new_tokens):
        with plain_attention(model):
            yield from sample_groups_plain(model, prompts, per_prompt, settings, eos_id=eos_id, seeds=seeds)
        return
    rows = max(per_prompt, min(settings.batch_size, len(prompts) * per_prompt))
    packs = is_worth_prepacking(rows, settings.max_new_tokens)
    if packs:  # before the copies take memory, return memory freed by the update to the OS
        malloc.trim()
    decoder = Decoder(model, packed_rows=rows if packs else 0)
    experts = ChosenExperts()
    with experts.recording(model):
        yield from _sample(decoder, experts, prompts, per_prompt, settings, eos_id, seeds)
    if packs:
        del decoder
        malloc.trim()


def _sample(
    decoder: Decoder,
    experts: ChosenExperts,
    prompts: Sequence[Sequence[int]],
    per_prompt: int,
    settings: Sampling,
    eos_id: Ends,
    seeds: Sequence[int],
) -> Iterator[tuple[int, list[Completion]]]:
    waiting = deque(sorted(range(len(prompts)), key=lambda i: -len(prompts[i])))
    draws_on = drawing_device(decoder.device)
    rows, logits = _Rows(settings.max_new_tokens, draws_on), None
    ended: dict[int, dict[int, Completion]] = {i: {} for i in waiting}
    while waiting or rows.owners:
        joining: list[int] = []
        count, tokens_of_prompts = len(rows.owners), 0
        while waiting and ((len(joining) + 1) * per_prompt + count <= settings.batch_size or not (joining or count)):
            tokens_of_prompts += len(prompts[waiting[0]])
            if joining and tokens_of_prompts > PASS_TOKENS:
                break  # it joins after the next step
            joining.append(waiting.popleft())
        if joining:
            prompt_logits = decoder.add_groups([prompts[i] for i in joining], per_prompt).repeat_interleave(
                per_prompt, 0
            )
            logits = prompt_logits if logits is None else torch.cat([logits, prompt_logits])
            rows.join(joining, per_prompt, [seeds[i] for i in joining])
            experts.join(joining, [len(prompts[i]) for i in joining], decoder.prompt_ends, per_prompt)
        assert logits is not None
        tokens = rows.draw(logits.float().to(draws_on), settings, decoder.fused)
        if ended_rows := rows.ended(eos_id):
            remaining = decoder.remove(ended_rows)
            for row, completion in zip(ended_rows, rows.completions(ended_rows, eos_id), strict=True):
                prompt, number = rows.owners[row]
                completion.experts = experts.of(row, prompt, len(completion.tokens) - 1)
                ended[prompt][number] = completion
                if len(ended[prompt]) == per_prompt:
                    yield prompt, [ended[prompt][i] for i in range(per_prompt)]
            rows.keep(remaining)
            index = to_device(torch.tensor(remaining, dtype=torch.long), draws_on)
            tokens = tokens.index_select(0, index)
            experts.keep(index)
        logits = decoder.step(tokens) if rows.owners else None
        if rows.owners:
            experts.step(rows.counts, decoder.steps - min(decoder.joined))
