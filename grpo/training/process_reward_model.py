"""A process reward model: a score at the end of each step of a chain of reasoning (Math-Shepherd, arXiv 2312.08935).

The reward model's architecture, a scalar head on the policy's, read where steps end instead of at the last token. It is
trained on the labels of `grpo.training.step_labels` by binary cross-entropy, and scores steps for process supervision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from grpo.config.common import Hardware
from grpo.config.jobs import ProcessRewardJob
from grpo.data.held_out import write_held_out
from grpo.data.records import Message, read_columns
from grpo.data.template import prompt_tokens
from grpo.distributed.fsdp import arithmetic, shard
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError
from grpo.model.loading import load_reward_model, load_tokenizer, save_tokenizer
from grpo.model.packed.attention import hidden_states
from grpo.model.packed.packing import micro_batches, pack
from grpo.processes.metrics_log import write_result
from grpo.rewards.steps import split_steps
from grpo.training.supervised import Example, fit, planned_steps

MARK = "r1flow_step_label"
"""In the model's config: which label it learnt. A policy's folder would load too, with a head drawn at random."""
COLUMNS = ("messages", "response", "ends", "right", "rollouts", "held_out")


def hard(right: int, rollouts: int) -> float:
    """1 if any rollout was right, else 0 (Math-Shepherd, eq. 3)."""
    return float(right > 0)


def soft(right: int, rollouts: int) -> float:
    """The share of rollouts that were right (Math-Shepherd, eq. 4)."""
    return right / rollouts


LABELS = {"hard": hard, "soft": soft}


@dataclass(frozen=True)
class Steps(Example):
    """A chain up to the end of its last step: `places` of the tokens that end steps, in what follows the prompt."""

    places: tuple[int, ...] = ()
    labels: tuple[float, ...] = ()  # 0 to 1, one a step


def steps_of(
    tokenizer: Any, messages: list[Message], response: str, ends: Sequence[int], labels: Sequence[float] = ()
) -> Steps:
    """A chain as the model reads it; `ends`: characters of the response where its steps end, in rising order."""
    read = tokenizer(response, add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in read["offset_mapping"]]
    places = [max(i for i, start in enumerate(starts) if start < end) for end in ends]
    prompt, rest = prompt_tokens(tokenizer, messages, "chat"), read["input_ids"][: places[-1] + 1]
    return Steps([prompt], [rest], weight=len(places), places=tuple(places), labels=tuple(labels))


def step_logits(model: Any, examples: Sequence[Steps]) -> Tensor:
    """The head's output at the end of every step, example after example: [S]."""
    device = next(model.parameters()).device
    packed = pack([e.prompts[0] for e in examples], [e.rests[0] for e in examples], device)
    hidden = hidden_states(model.base_model, packed.ids, packed.positions, packed.attention)
    index = [start + place for start, e in zip(packed.starts, examples, strict=True) for place in e.places]
    return model.score(hidden[torch.tensor(index, device=device)]).squeeze(-1).float()


def step_loss(model: Any, examples: list[Any]) -> Tensor:
    """Sum over all steps of the binary cross-entropy against their labels."""
    logits = step_logits(model, examples)
    labels = logits.new_tensor([label for example in examples for label in example.labels])
    return binary_cross_entropy_with_logits(logits, labels, reduction="sum")


def train_process_reward_model(job: ProcessRewardJob) -> None:
    """Rows that are held out are scored at the end, never trained on."""
    settings = job.settings
    tokenizer = load_tokenizer(job.model)
    rows = read_columns(job.data, COLUMNS)
    made = [(row, _example(tokenizer, row, LABELS[settings.label])) for row in rows]
    fitting = [(row, example) for row, example in made if example.tokens <= settings.max_tokens]
    train = [example for row, example in fitting if not row["held_out"]]
    held_out = [(row, example) for row, example in fitting if row["held_out"]]
    if not train:
        raise InputError(f"{job.data}: nothing to train on fits in max_tokens={settings.max_tokens} ({len(rows)} rows)")
    torch.manual_seed(job.seed)  # the head is drawn anew
    model = load_reward_model(job.model, settings.hardware.to_train())
    model.config.pad_token_id = tokenizer.pad_token_id
    setattr(model.config, MARK, settings.label)
    steps = planned_steps(len(train), settings, settings.epochs, settings.max_steps)
    parallel = Parallel.start(settings.hardware)
    sharded = shard(model, parallel, dtype=arithmetic(settings.hardware))
    done = fit(job, sharded, train, step_loss, settings, steps)
    with sharded.whole() as trained:
        scores = score_steps(trained, [example for _, example in held_out], settings.micro_batch_tokens)
    sharded.save(job.out)
    if parallel.main:
        save_tokenizer(tokenizer, job.model, job.out)
        if held_out:
            write_held_out(job.out, [{**row, "scores": s} for (row, _), s in zip(held_out, scores, strict=True)])
        counts = {"train": len(train), "held_out": len(held_out), "too_long": len(rows) - len(fitting)}
        metrics = agreement([e.labels for _, e in held_out], scores) if held_out else {}
        write_result(job.result, done, steps, counts=counts, metrics=metrics)
    parallel.close()


@torch.inference_mode()
def score_steps(model: Any, examples: Sequence[Steps], max_tokens: int) -> list[list[float]]:
    """A score from 0 to 1 for each step of each example: how likely it is that a right answer can follow."""
    units = [[i] for i in range(len(examples))]
    prompts, rests = [e.prompts[0] for e in examples], [e.rests[0] for e in examples]
    scores: list[list[float]] = [[] for _ in examples]
    for batch in micro_batches(prompts, rests, units, max_tokens):
        found = iter(step_logits(model, [examples[i] for i in batch]).sigmoid().tolist())
        for i in batch:
            scores[i] = [next(found) for _ in examples[i].places]
    return scores


def agreement(labels: Sequence[Sequence[float]], scores: Sequence[Sequence[float]]) -> dict[str, float]:
    """Shares of all steps: those on their label's side of 0.5, and the larger side, which guessing gets right."""
    both = [pair for of in zip(labels, scores, strict=True) for pair in zip(*of, strict=True)]
    pairs = [(label >= 0.5, score >= 0.5) for label, score in both]
    good = sum(label for label, _ in pairs) / len(pairs)
    return {
        "held_out_accuracy": sum(label == score for label, score in pairs) / len(pairs),
        "held_out_majority": max(good, 1 - good),
    }


class StepScorer:
    """A trained process reward model."""

    def __init__(self, folder: str, hardware: Hardware, max_tokens: int = 16384):
        self.tokenizer = load_tokenizer(folder)
        self.model = load_reward_model(folder, hardware)
        self.max_tokens = max_tokens
        if not hasattr(self.model.config, MARK):
            raise InputError(f"{folder}: no process reward model; jobs of kind process_reward_model train one")

    def __call__(self, messages: list[Message], responses: Sequence[str]) -> list[list[tuple[int, float]]]:
        """Of each response to a prompt: where its steps end, in characters, and their scores from 0 to 1."""
        ends = [[end for _, end in split_steps(response)] for response in responses]
        some = [(i, of) for i, of in enumerate(ends) if of]
        examples = [steps_of(self.tokenizer, messages, responses[i], of) for i, of in some]
        found: list[list[tuple[int, float]]] = [[] for _ in responses]
        for (i, of), scores in zip(some, score_steps(self.model, examples, self.max_tokens), strict=True):
            found[i] = list(zip(of, scores, strict=True))
        return found


def _example(tokenizer: Any, row: dict[str, Any], label: Any) -> Steps:
    labels = [label(right, row["rollouts"]) for right in row["right"]]
    return steps_of(tokenizer, row["messages"], row["response"], row["ends"], labels)
