"""Scores reasoning steps with a process reward model, at the end of each step (Math-Shepherd, arXiv
2312.08935)."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo.config.common import Hardware
from grpo.data.examples import Example, compact
from grpo.data.records import Message
from grpo.data.template import continuation, opened_reasoning, prompt_tokens
from grpo.errors import InputError
from grpo.model.loading import load_reward_model, load_tokenizer
from grpo.model.logprobs import token_states
from grpo.model.packed.packing import micro_batches
from grpo.rewards.steps import split_steps

MARK = "r1flow_step_label"
"""Field of the model's config that holds the kind of label it was trained on. It identifies process reward models: a
policy's folder would also load, but with a random head."""


@dataclass(frozen=True)
class Steps(Example):
    """A chain of reasoning up to the end of its last step. `places`: indices of the tokens that end steps, among the
    tokens after the prompt."""

    places: tuple[int, ...] = ()
    labels: tuple[float, ...] = ()  # in [0, 1], one per step


def steps_of(
    tokenizer: Any, messages: list[Message], response: str, ends: Sequence[int], labels: Sequence[float] = ()
) -> Steps:
    """Tokenizes a chain. `ends`: ascending character offsets in the response where its steps end."""
    prompt = prompt_tokens(tokenizer, messages, "chat")
    text = continuation(opened_reasoning(tokenizer, prompt), response)
    read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = [len(response) - len(text) + start for start, _ in read["offset_mapping"]]
    places = [bisect.bisect_left(starts, end) - 1 for end in ends]
    rest = read["input_ids"][: places[-1] + 1]
    return Steps([compact(prompt)], [compact(rest)], weight=len(places), places=tuple(places), labels=tuple(labels))


def step_logits(model: Any, examples: Sequence[Steps]) -> Tensor:
    """The head's output at the end of every step, example after example: [S]."""
    prompts, rests = [e.prompts[0] for e in examples], [e.rests[0] for e in examples]
    ends = [(row, len(e.prompts[0]) + place) for row, e in enumerate(examples) for place in e.places]
    rows, columns = torch.tensor(ends).unbind(1)
    return model.score(token_states(model.base_model, prompts, rests, rows, columns)).squeeze(-1).float()


@torch.inference_mode()
def score_steps(model: Any, examples: Sequence[Steps], max_tokens: int) -> list[list[float]]:
    """A score in [0, 1] for each step of each example: the estimated probability that a correct answer can follow."""
    units = [[i] for i in range(len(examples))]
    prompts, rests = [e.prompts[0] for e in examples], [e.rests[0] for e in examples]
    scores: list[list[float]] = [[] for _ in examples]
    for batch in micro_batches(prompts, rests, units, max_tokens):
        scores_in_batch = iter(step_logits(model, [examples[i] for i in batch]).sigmoid().tolist())
        for i in batch:
            scores[i] = [next(scores_in_batch) for _ in examples[i].places]
    return scores


class StepScorer:
    """A trained process reward model."""

    def __init__(self, folder: str, hardware: Hardware, max_tokens: int = 16384):
        self.tokenizer = load_tokenizer(folder)
        self.model = load_reward_model(folder, hardware)
        self.max_tokens = max_tokens
        if not hasattr(self.model.config, MARK):
            raise InputError(f"{folder}: no process reward model; jobs of kind process_reward_model train one")

    def __call__(self, messages: list[Message], responses: Sequence[str]) -> list[list[tuple[int, float]]]:
        """For each response to a prompt: the character offset of each step's end, and the step's score in [0, 1]."""
        ends = [[end for _, end in split_steps(response)] for response in responses]
        some = [(i, of) for i, of in enumerate(ends) if of]
        examples = [steps_of(self.tokenizer, messages, responses[i], of) for i, of in some]
        steps: list[list[tuple[int, float]]] = [[] for _ in responses]
        for (i, of), scores in zip(some, score_steps(self.model, examples, self.max_tokens), strict=True):
            steps[i] = list(zip(of, scores, strict=True))
        return steps
