"""Hidden states and log-probabilities of given sequences, with gradients, for training.

Uses packing (`grpo.model.packed`) if the model was found to compute the same that way, else transformers' own forward
pass on rows of equal length. `grpo.model.probe` decides this once, when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo.distributed.sequence_group import SequenceGroup, sequence_group
from grpo.model.equal_forwards import run_forwards
from grpo.model.lm_head import Head, backbone_of
from grpo.model.packed.attention import hidden_states, is_packed, is_unfused
from grpo.model.packed.packing import Pack, integers, pack, ranges
from grpo.model.packed.shared_tokens import SharedTokens
from grpo.model.packed.transfer import to_device
from grpo.model.plain import plain_states
from grpo.model.rope import reset_rope, rope_limit

Tokens = Sequence[int]


def token_states(
    backbone: Any, prompts: Sequence[Tokens], rests: Sequence[Tokens], rows: Tensor, columns: Tensor
) -> Tensor:
    """Last hidden states [K, H] of a transformer without its head, over B sequences prompt + rest.

    `rows`, `columns` [K]: the sequence of each token whose state is returned, and its position there.
    """
    sequences = [[*prompt, *rest] for prompt, rest in zip(prompts, rests, strict=True)]
    if not is_packed(backbone):
        return plain_states(backbone, sequences, rows, columns)
    limit = rope_limit(backbone)
    if limit is None:
        return _packed_states(backbone, prompts, rests, rows, columns)
    reset_rope(backbone)
    if max(map(len, sequences)) > limit:
        return _states_one_by_one(backbone, sequences, rows, columns)
    return run_forwards(backbone, [lambda: _packed_states(backbone, prompts, rests, rows, columns)])[0]


def _packed_states(
    backbone: Any, prompts: Sequence[Tokens], rests: Sequence[Tokens], rows: Tensor, columns: Tensor
) -> Tensor:
    device = next(backbone.parameters()).device
    packed = pack(prompts, rests, device, unfused=is_unfused(backbone))
    hidden = hidden_states(backbone, packed.ids, packed.positions, packed.attention)
    return hidden.index_select(0, to_device(_places(packed, prompts, rows, columns), device))


def _shared_states(
    backbone: Any,
    prompts: Sequence[Tokens],
    rests: Sequence[Tokens],
    rows: Tensor,
    columns: Tensor,
    group: SequenceGroup,
) -> tuple[Tensor, Tensor]:
    """The states of those of the K tokens that are this process's part of a pack, and their indices among K."""
    device = next(backbone.parameters()).device
    packed = pack(prompts, rests, device, unfused=is_unfused(backbone), multiple=group.size)
    part = group.part(packed.ids.shape[1])
    layout = SharedTokens(packed.attention, group)
    hidden = hidden_states(backbone, packed.ids[:, part], packed.positions[:, part], layout)
    places = _places(packed, prompts, rows, columns) - part.start
    own = ((places >= 0) & (places < len(hidden))).nonzero().squeeze(1)
    return hidden.index_select(0, to_device(places[own], device)), own


def _places(packed: Pack, prompts: Sequence[Tokens], rows: Tensor, columns: Tensor) -> Tensor:
    """Index in the pack [K] of the tokens at positions `columns` of sequences `rows`."""
    lengths = integers([len(prompt) for prompt in prompts])[rows]
    in_prompt = integers(packed.first)[rows] + 1 - lengths + columns
    return torch.where(columns < lengths, in_prompt, integers(packed.starts)[rows] + columns - lengths)


def _states_one_by_one(backbone: Any, sequences: Sequence[Tokens], rows: Tensor, columns: Tensor) -> Tensor:
    """`token_states` of a model whose rotary embedding depends on the length of the sequence."""
    mine = [(rows == row).nonzero().squeeze(1) for row in range(len(sequences))]

    def forward(row: int) -> Tensor:
        reset_rope(backbone)
        return _packed_states(backbone, [[]], [sequences[row]], torch.zeros_like(mine[row]), columns[mine[row]])

    states = run_forwards(backbone, [partial(forward, row) for row in range(len(sequences))])
    return torch.cat(states)[torch.cat(mine).argsort().to(states[0].device)]


def completion_states(
    backbone: Any, prompts: Sequence[Tokens], completions: Sequence[Tokens]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Last hidden state before each completion token.

    `backbone` is a transformer without its head. Returns states [N, H] for the batch's N completion tokens, row by
    row, the tokens themselves [N], and each one's row [N] and column [N] in a [B, C] table of completions. If processes
    share the pack (`sharing_tokens`), N counts this process's tokens, and `whole_table` joins the tables.
    """
    device = next(backbone.parameters()).device
    lengths = integers([len(completion) for completion in completions])
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    columns = ranges(torch.zeros_like(lengths), lengths)
    before = columns + integers([len(prompt) - 1 for prompt in prompts])[rows]
    # A completion's last token predicts nothing, so it is omitted, unless states may depend on the length.
    by_length = not is_packed(backbone) or rope_limit(backbone) is not None
    rests = completions if by_length else [completion[:-1] for completion in completions]
    targets = integers([token for completion in completions for token in completion])
    if (group := sequence_group()) is None:
        states = token_states(backbone, prompts, rests, rows, before)
    else:
        states, own = _shared_states(backbone, prompts, rests, rows, before, group)
        targets, rows, columns = targets[own], rows[own], columns[own]
    index = to_device(torch.stack([targets, rows, columns]), device)
    return states, index[0], index[1], index[2]


def completion_logprobs(
    model: Any, prompts: Sequence[Tokens], completions: Sequence[Tokens], temperature: float
) -> Tensor:
    """Log-probability of every completion token given the tokens before it, at a softmax temperature.

    Returns [B, C] with C the longest completion, 0 beyond a completion's end.
    """
    states, targets, rows, columns = completion_states(backbone_of(model), prompts, completions)
    logprobs = Head(model).logprobs(states, targets, temperature)
    table = logprobs.new_zeros(len(prompts), max(map(len, completions)))
    return whole_table(table.index_put((rows, columns), logprobs))


def whole_table(table: Tensor) -> Tensor:
    """A table of completions with the values of all tokens, from one of this process's tokens (0 elsewhere)."""
    group = sequence_group()
    return table if group is None else group.sum(table)
