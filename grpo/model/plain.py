"""The plain way to run a model: transformers' own forward pass and `generate`, with rows of equal length in each call.

Nothing is padded, so positions, windows and recurrent states behave as for a single sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from grpo.data.completions import Ends, each_end
from grpo.distributed.threads import use_all_threads
from grpo.model.equal_forwards import run_forwards
from grpo.model.lm_head import backbone_of
from grpo.model.rope import reset_rope

Draw = Callable[[Tensor], Tensor]
"""Logits of the next token [B, V], in float32 -> tokens [B]."""


def plain_states(backbone: Any, sequences: Sequence[Sequence[int]], rows: Tensor, columns: Tensor) -> Tensor:
    """Last hidden states [K, H] of the tokens at positions `columns` [K] in the sequences `rows` [K]."""
    device = next(backbone.parameters()).device
    use_all_threads(device)
    by_length: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        by_length.setdefault(len(sequence), []).append(row)
    groups = [*by_length.values()]
    hidden = run_forwards(backbone, [_forward(backbone, sequences, group, device) for group in groups])
    states, order = [], []
    for of_group, group in zip(hidden, groups, strict=True):
        place = torch.full((len(sequences),), -1)
        place[group] = torch.arange(len(group))
        mine = (place[rows] >= 0).nonzero().squeeze(1)
        states.append(of_group[place[rows[mine]].to(device), columns[mine].to(device)])
        order.append(mine)
    return torch.cat(states)[torch.cat(order).argsort().to(device)]


def _forward(
    backbone: Any, sequences: Sequence[Sequence[int]], group: list[int], device: torch.device
) -> Callable[[], Tensor]:
    """The forward pass of sequences of equal length."""

    def forward() -> Tensor:
        reset_rope(backbone)
        ids = torch.tensor([[*sequences[row]] for row in group], device=device)
        hidden: Tensor = backbone(input_ids=ids, use_cache=False).last_hidden_state
        return hidden

    return forward


def generate(model: Any, prompts: Tensor, max_new_tokens: int, eos_id: Ends | None, draw: Draw) -> Tensor:
    """Generates tokens [B, T] after prompts [B, P] of equal length, each chosen by `draw`. Ignore tokens after an end
    token.

    The model's own generation settings, such as a repetition penalty, do not apply.
    """
    use_all_threads(prompts.device)
    reset_rope(model)
    ends = None if eos_id is None else each_end(eos_id)
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=ends, pad_token_id=ends[0] if ends else 0
    )
    with _without_defaults(model):
        output: Tensor = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=settings,
            logits_processor=LogitsProcessorList([_Choice(draw)]),
        )
    return output[:, prompts.shape[1] :]


def generates_alone(model: Any) -> bool:
    """Whether the `generate` of a model is right for one sequence at a time only."""
    return bool(getattr(backbone_of(model), "generates_alone", False))


class _Choice(LogitsProcessor):
    """Restricts `generate` to the drawn token."""

    def __init__(self, draw: Draw):
        self.draw = draw

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens = self.draw(scores.float()).to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0)


@contextmanager
def _without_defaults(model: Any) -> Iterator[None]:
    before, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before
