"""A process reward model: scores each step of a chain of reasoning at the step's end (Math-Shepherd, arXiv 2312.08935).

It has the architecture of a reward model (the policy's transformer with a scalar head), read at the ends of steps
instead of at the last token. It is trained with binary cross-entropy on the labels of `grpo.training.step_labels`, and
scores steps for process supervision.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from grpo.config.jobs import ProcessRewardJob
from grpo.data.held_out import write_held_out
from grpo.data.records import read_columns
from grpo.distributed.fsdp import compute_dtype
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError
from grpo.model.loading import REWARD_MODEL, load_tokenizer, save_tokenizer
from grpo.model.sharded.loading import load_sharded
from grpo.processes.metrics_log import write_result
from grpo.scoring.step_model import MARK, Steps, score_steps, step_logits, steps_of
from grpo.training.supervised import fit, planned_steps

COLUMNS = ("messages", "response", "ends", "right", "rollouts", "held_out")


def hard(right: int, rollouts: int) -> float:
    """1 if any rollout was correct, else 0 (Math-Shepherd, eq. 3)."""
    return float(right > 0)


def soft(right: int, rollouts: int) -> float:
    """The share of correct rollouts (Math-Shepherd, eq. 4)."""
    return right / rollouts


LABELS = {"hard": hard, "soft": soft}


def step_loss(model: Any, examples: list[Any]) -> Tensor:
    """Sum over all steps of the binary cross-entropy against their labels."""
    logits = step_logits(model, examples)
    labels = logits.new_tensor([label for example in examples for label in example.labels])
    return binary_cross_entropy_with_logits(logits, labels, reduction="sum")


def train_process_reward_model(job: ProcessRewardJob) -> None:
    """Trains a process reward model. Held-out rows are scored at the end, never trained on."""
    settings = job.settings
    tokenizer = load_tokenizer(job.model)
    rows = read_columns(job.data, COLUMNS)
    for number, row in enumerate(rows, 1):
        _check(row, f"{job.data}, row {number}")
    examples_of_rows = [(row, _example(tokenizer, row, LABELS[settings.label])) for row in rows]
    fitting = [(row, example) for row, example in examples_of_rows if example.tokens <= settings.max_tokens]
    train = [example for row, example in fitting if not row["held_out"]]
    held_out = [(row, example) for row, example in fitting if row["held_out"]]
    if not train:
        raise InputError(f"{job.data}: nothing to train on fits in max_tokens={settings.max_tokens} ({len(rows)} rows)")
    parallel = Parallel.start(settings.hardware)
    torch.manual_seed(job.seed)  # the head is initialized from the seed
    hardware, computed = settings.hardware.to_train(), compute_dtype(settings.hardware)
    sharded = load_sharded(job.model, hardware, parallel, kind=REWARD_MODEL, dtype=computed)
    config = sharded.model.config
    config.pad_token_id = tokenizer.pad_token_id
    setattr(config, MARK, settings.label)
    steps = planned_steps(len(train), settings, settings.epochs, settings.max_steps)
    done = fit(job, sharded, train, step_loss, settings, steps)
    (own,) = score_steps(sharded, [parallel.deal([example for _, example in held_out])], settings.micro_batch_tokens)
    scores = parallel.collect(own)
    sharded.save(job.out)
    if parallel.is_main:
        save_tokenizer(tokenizer, job.model, job.out)
        if held_out:
            write_held_out(job.out, [{**row, "scores": s} for (row, _), s in zip(held_out, scores, strict=True)])
        counts = {"train": len(train), "held_out": len(held_out), "too_long": len(rows) - len(fitting)}
        metrics = agreement([e.labels for _, e in held_out], scores) if held_out else {}
        write_result(job.result, done, steps, counts=counts, metrics=metrics)
    parallel.close()


def agreement(labels: Sequence[Sequence[float]], scores: Sequence[Sequence[float]]) -> dict[str, float]:
    """Shares of all steps: those whose score is on the same side of 0.5 as the label, and the majority class (the
    baseline of constant guessing)."""
    both = [pair for of in zip(labels, scores, strict=True) for pair in zip(*of, strict=True)]
    pairs = [(label >= 0.5, score >= 0.5) for label, score in both]
    good = sum(label for label, _ in pairs) / len(pairs)
    return {
        "held_out_accuracy": sum(label == score for label, score in pairs) / len(pairs),
        "held_out_majority": max(good, 1 - good),
    }


def _check(row: dict[str, Any], where: str) -> None:
    ends, right, rollouts = row["ends"] or [], row["right"] or [], row["rollouts"] or 0
    length = len(row["response"])
    if not ends or ends[-1] > length or any(end <= before for before, end in pairwise([0, *ends])):
        raise InputError(f"{where}: ends is {ends}; needed are ascending offsets in the response, from 1 to {length}")
    if len(right) != len(ends):
        raise InputError(f"{where}: right has {len(right)} numbers, and ends {len(ends)}; one for each step is needed")
    if rollouts < 1 or not all(0 <= count <= rollouts for count in right):
        raise InputError(f"{where}: right is {right} of {rollouts} rollouts; each must be in 0 to rollouts, 1 or more")


def _example(tokenizer: Any, row: dict[str, Any], label: Any) -> Steps:
    labels = [label(right, row["rollouts"]) for right in row["right"]]
    return steps_of(tokenizer, row["messages"], row["response"], row["ends"], labels)
