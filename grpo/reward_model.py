"""Reward models: a scalar head trained on preferences (helpful) or on labels (safe)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from grpo.data import read_columns
from grpo.errors import InputError
from grpo.jobs import RewardModelJob
from grpo.packing import shared_prefix
from grpo.parallel import Parallel
from grpo.policy import load_reward_model, load_tokenizer, save_tokenizer
from grpo.runlog import write_result
from grpo.scoring import conversation_tokens, score_sequences
from grpo.sharded import arithmetic, shard
from grpo.supervised import Example, fit, planned_steps

COLUMNS = {"pairs": ("messages", "chosen", "rejected"), "points": ("messages", "response", "label")}


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigma(r_w - r_l), mean over pairs; both [B]. Ties must have been dropped."""
    return -logsigmoid(chosen - rejected).mean()


def pointwise(scores: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of logits [B] against labels [B] in {0, 1}."""
    return binary_cross_entropy_with_logits(scores, labels)


def train_reward_model(job: RewardModelJob) -> None:
    """Rows whose column `held_out` is true are scored at the end, never trained on."""
    settings = job.settings
    tokenizer = load_tokenizer(job.model)
    train, held_out = (
        [_example(tokenizer, row, job.loss) for row in rows] for rows in read_preferences(job.data, job.loss)
    )
    fitting = [example for example in train if max(map(len, _rows(example))) <= settings.max_tokens]
    if not fitting:
        raise InputError(f"{job.data}: nothing fits in max_tokens={settings.max_tokens} ({len(train)} dropped)")
    torch.manual_seed(job.seed)  # the head is drawn anew
    model = load_reward_model(job.model, settings.hardware.to_train())
    model.config.pad_token_id = tokenizer.pad_token_id
    steps = planned_steps(len(fitting), settings, settings.epochs, settings.max_steps)
    parallel = Parallel.start(settings.hardware)
    sharded = shard(model, parallel, dtype=arithmetic(settings.hardware))
    done = fit(job, sharded, fitting, _pair_loss if job.loss == "pairs" else _point_loss, settings, steps)
    with sharded.whole() as trained:
        metrics = {"held_out_accuracy": _accuracy(trained, held_out, job.loss)} if held_out else {}
    sharded.save(job.out)
    if parallel.main:
        save_tokenizer(tokenizer, job.model, job.out)
        counts = {"train": len(fitting), "held_out": len(held_out), "too_long": len(train) - len(fitting)}
        write_result(job.result, done, steps, counts=counts, metrics=metrics)
    parallel.close()


def read_preferences(path: Path, loss: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows to train on, held-out rows)."""
    rows = read_columns(path, [*COLUMNS[loss], "held_out"])
    return [row for row in rows if not row["held_out"]], [row for row in rows if row["held_out"]]


def _example(tokenizer: Any, row: dict[str, Any], loss: str) -> Example:
    """Two sequences, chosen and rejected, that share what they have in common; or one, with its label."""
    if loss == "points":
        ids = conversation_tokens(tokenizer, row["messages"], row["response"])
        return Example([ids[:1]], [ids[1:]], weight=1, label=float(row["label"]))
    sides = [conversation_tokens(tokenizer, row["messages"], row[side]) for side in ("chosen", "rejected")]
    shared = shared_prefix(sides)
    return Example([side[:shared] for side in sides], [side[shared:] for side in sides], weight=1)


def _rows(example: Example) -> list[list[int]]:
    return [[*prompt, *rest] for prompt, rest in zip(example.prompts, example.rests, strict=True)]


def _scores(model: Any, examples: list[Example]) -> Tensor:
    prompts = [prompt for example in examples for prompt in example.prompts]
    return score_sequences(model, prompts, [rest for example in examples for rest in example.rests])


def _pair_loss(model: Any, examples: list[Example]) -> Tensor:
    scores = _scores(model, examples)
    return bradley_terry(scores[::2], scores[1::2]) * len(examples)


def _point_loss(model: Any, examples: list[Example]) -> Tensor:
    scores = _scores(model, examples)
    return pointwise(scores, scores.new_tensor([example.label for example in examples])) * len(examples)


@torch.inference_mode()
def _accuracy(model: Any, examples: list[Example], loss: str) -> float:
    """Share of held-out pairs in the right order, or of held-out points on the right side of 0."""
    right = 0
    for example in examples:
        scores = _scores(model, [example]).tolist()
        right += scores[0] > scores[1] if loss == "pairs" else (scores[0] > 0) == (example.label > 0.5)
    return right / len(examples)
