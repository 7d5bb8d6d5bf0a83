"""Log-probabilities of completions under a model, and the batches that they are computed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def pad(rows: Sequence[Sequence[int]], value: int, left: bool = False) -> Tensor:
    """[B, T] from B rows of different lengths."""
    width = max(len(row) for row in rows)
    fill = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([[*f, *r] if left else [*r, *f] for r, f in zip(rows, fill, strict=True)])


def stack(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """[B, T] from B vectors of different lengths; what is past a row's end holds 0."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device)


def completion_states(
    trunk: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last hidden state before each completion token.

    `trunk` is a transformer without its head. Returns states [N, H] for the N completion tokens of the batch, row after
    row, the tokens themselves [N], and the row [N] and column [N] of each in a [B, C] table of completions.
    """
    device = next(trunk.parameters()).device
    ids = pad([[*p, *c] for p, c in zip(prompts, completions, strict=True)], 0).to(device)
    lengths = torch.tensor([len(p) + len(c) for p, c in zip(prompts, completions, strict=True)], device=device)
    attention = (torch.arange(ids.shape[1], device=device) < lengths[:, None]).long()
    hidden = trunk(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
    predictors = torch.tensor(list(_predictors(prompts, completions)), device=device)
    rows, positions, columns = predictors.unbind(1)
    return hidden[rows, positions], ids[rows, positions + 1], rows, columns


def completion_logprobs(
    model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float
) -> Tensor:
    """Log-probability of every completion token given what precedes it, at a softmax temperature.

    Returns [B, C] with C the longest completion; positions past a completion's end hold 0. The vocabulary-wide
    logits exist for completion tokens only: with long prompts they would dominate the memory.
    """
    states, targets, rows, columns = completion_states(trunk_of(model), prompts, completions)
    logits = model.get_output_embeddings()(states).float() / temperature
    chosen = logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(1)
    return chosen.new_zeros(len(prompts), max(map(len, completions))).index_put((rows, columns), chosen)


def trunk_of(model: Any) -> Any:
    """The transformer under a language model's head; adapters are inside it and stay in force."""
    return (model.get_base_model() if hasattr(model, "peft_config") else model).base_model


def _predictors(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, int]]:
    """(row, position whose output predicts the token, column in the completion) for every completion token."""
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        for column in range(len(completion)):
            yield row, len(prompt) - 1 + column, column


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices sorted by length and cut so that no batch holds more than `max_tokens` padded tokens (at least one)."""
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        longest = max(longest, lengths[index])
        if not batches or longest * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    return batches
