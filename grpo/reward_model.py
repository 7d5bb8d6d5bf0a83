"""Reward models: a scalar head trained on preferences (helpful) or on labels (safe)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from grpo.data import read_columns
from grpo.errors import InputError
from grpo.jobs import RewardModelJob
from grpo.logprobs import pad
from grpo.policy import load_reward_model, load_tokenizer, save_tokenizer
from grpo.runlog import write_result
from grpo.scoring import conversation_tokens, score_rows
from grpo.supervised import fit

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
        [_tokens(tokenizer, row, job.loss) for row in rows] for rows in read_preferences(job.data, job.loss)
    )
    fitting = [row for row in train if max(map(len, row[:-1])) <= settings.max_tokens]
    if not fitting:
        raise InputError(f"{job.data}: nothing fits in max_tokens={settings.max_tokens} ({len(train)} dropped)")
    torch.manual_seed(job.seed)  # the head is drawn anew
    model = load_reward_model(job.model, settings.hardware)
    model.config.pad_token_id = tokenizer.pad_token_id
    steps = settings.epochs * math.ceil(len(fitting) / settings.batch_size)
    steps = min(steps, settings.max_steps or steps)
    done = fit(
        job,
        model,
        fitting,
        _collate,
        steps=steps,
        batch_size=settings.batch_size,
        micro_batch_size=settings.micro_batch_size,
        save_every=settings.save_every,
        optimizer=settings.optimizer,
        hardware=settings.hardware,
        loss=_pair_loss if job.loss == "pairs" else _point_loss,
    )
    model.eval()
    metrics = {"held_out_accuracy": _accuracy(model, held_out, job.loss)} if held_out else {}
    model.save_pretrained(job.out)
    save_tokenizer(tokenizer, job.model, job.out)
    counts = {"train": len(fitting), "held_out": len(held_out), "too_long": len(train) - len(fitting)}
    write_result(job.result, done, steps, counts=counts, metrics=metrics)


def read_preferences(path: Path, loss: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows to train on, held-out rows)."""
    rows = read_columns(path, [*COLUMNS[loss], "held_out"])
    return [row for row in rows if not row["held_out"]], [row for row in rows if row["held_out"]]


def _tokens(tokenizer: Any, row: dict[str, Any], loss: str) -> tuple[Any, ...]:
    """(chosen ids, rejected ids, None) or (response ids, label)."""
    if loss == "pairs":
        sides = (conversation_tokens(tokenizer, row["messages"], row[side]) for side in ("chosen", "rejected"))
        return (*sides, None)
    return conversation_tokens(tokenizer, row["messages"], row["response"]), float(row["label"])


def _collate(rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    # Lists of ids pass through as they are: score_rows pads them. The mask only counts tokens.
    ids = [side for row in rows for side in row[:-1]]
    return {"rows": rows, "attention_mask": pad([[1] * len(side) for side in ids], 0)}


def _pair_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    rows = batch["rows"]
    scores = score_rows(model, [row[0] for row in rows] + [row[1] for row in rows])
    return bradley_terry(scores[: len(rows)], scores[len(rows) :])


def _point_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    rows = batch["rows"]
    scores = score_rows(model, [row[0] for row in rows])
    return pointwise(scores, torch.tensor([row[1] for row in rows], device=scores.device))


@torch.inference_mode()
def _accuracy(model: Any, rows: list[tuple[Any, ...]], loss: str) -> float:
    """Share of held-out pairs in the right order, or of held-out points on the right side of 0."""
    right = 0
    for row in rows:
        scores = score_rows(model, row[:-1]).tolist()
        right += scores[0] > scores[1] if loss == "pairs" else (scores[0] > 0) == (row[1] > 0.5)
    return right / len(rows)
