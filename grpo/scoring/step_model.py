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
from grpo.distributed.fsdp import Sharded
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError
from grpo.model.loading import REWARD_MODEL, choose_device, load_tokenizer
from grpo.model.logprobs import token_states
from grpo.model.packed.packing import micro_batches
from grpo.model.sharded.loading import load_sharded
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


FILLER = [Steps([compact([0])], [compact([0])], weight=1, places=(0,))]
"""A chain of one step, for a process that has none."""


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
def score_steps(model: Sharded, groups: Sequence[Sequence[Steps]], max_tokens: int) -> list[list[list[float]]]:
    """A score in [0, 1] for each step of each example of each group: the estimated probability that a correct answer
    can follow. A micro-batch has examples of one group. All processes must call it together, each with its groups."""
    batches: list[list[tuple[int, int]]] = []  # numbers of a group and of an example in it
    for number, examples in enumerate(groups):
        prompts, rests = [e.prompts[0] for e in examples], [e.rests[0] for e in examples]
        units = [[i] for i in range(len(examples))]
        batches += ([(number, i) for i in batch] for batch in micro_batches(prompts, rests, units, max_tokens))
    chains = [[groups[number][i] for number, i in batch] for batch in batches]
    scored = model.parallel.map_together(lambda batch: model(step_logits, batch).sigmoid().tolist(), chains, FILLER)
    scores: list[list[list[float]]] = [[[] for _ in examples] for examples in groups]
    for batch, of_batch in zip(batches, map(iter, scored), strict=True):
        for number, i in batch:
            scores[number][i] = [next(of_batch) for _ in groups[number][i].places]
    return scores


class StepScorer:
    """A trained process reward model."""

    def __init__(self, folder: str, hardware: Hardware, max_tokens: int = 16384, parallel: Parallel | None = None):
        """Loads the model from a folder, sharded over the processes of `parallel`. None: this process has it whole."""
        parallel = parallel or Parallel.alone(choose_device(hardware))
        self.tokenizer = load_tokenizer(folder)
        self.model = load_sharded(folder, hardware, parallel, kind=REWARD_MODEL, trained=False)
        self.max_tokens = max_tokens
        if not hasattr(self.model.model.config, MARK):
            raise InputError(f"{folder}: no process reward model; jobs of kind process_reward_model train one")

    def __call__(self, groups: Sequence[tuple[list[Message], Sequence[str]]]) -> list[list[list[tuple[int, float]]]]:
        """For each response to each prompt: the character offset of each step's end, and the step's score in [0, 1].
        All processes must call it together, each with its prompts."""
        ends = [[[end for _, end in split_steps(response)] for response in responses] for _, responses in groups]
        examples = [
            [steps_of(self.tokenizer, messages, r, of) for r, of in zip(responses, of_group, strict=True) if of]
            for (messages, responses), of_group in zip(groups, ends, strict=True)
        ]
        steps: list[list[list[tuple[int, float]]]] = []
        scored = score_steps(self.model, examples, self.max_tokens)
        for of_group, scores in zip(ends, map(iter, scored), strict=True):
            steps.append([list(zip(of, next(scores), strict=True)) if of else [] for of in of_group])
        return steps
