"""Supervised fine-tuning: cross-entropy on the response's tokens only (R1, stages 1 and 3b)."""

from __future__ import annotations

import math
from typing import Any

import torch

from grpo.data import read_columns
from grpo.errors import InputError
from grpo.jobs import SFTJob
from grpo.logprobs import pad
from grpo.policy import IGNORE, load_policy, load_tokenizer, save_policy, save_tokenizer
from grpo.runlog import write_result
from grpo.supervised import fit
from grpo.template import completion_tokens, prompt_tokens

Row = tuple[list[int], list[int]]
"""(prompt ids, completion ids)"""


def train_sft(job: SFTJob) -> None:
    settings = job.settings
    tokenizer = load_tokenizer(job.model)
    rows, dropped = tokenize(tokenizer, read_pairs(job), settings.max_tokens)
    if not rows:
        raise InputError(f"{job.data}: no sequence fits in max_tokens={settings.max_tokens} ({dropped} dropped)")
    steps = settings.epochs * math.ceil(len(rows) / settings.batch_size)
    steps = min(steps, settings.max_steps or steps)
    model = load_policy(job.model, settings.hardware, settings.lora)
    done = fit(
        job,
        model,
        rows,
        collate,
        steps=steps,
        batch_size=settings.batch_size,
        micro_batch_size=settings.micro_batch_size,
        save_every=settings.save_every,
        optimizer=settings.optimizer,
        hardware=settings.hardware,
    )
    save_policy(model, job.out)
    save_tokenizer(tokenizer, job.model, job.out)
    write_result(job.result, done, steps, counts={"sequences": len(rows), "too_long": dropped})


def read_pairs(job: SFTJob) -> list[dict[str, Any]]:
    return read_columns(job.data, ["messages", "completion"])


def tokenize(tokenizer: Any, pairs: list[dict[str, Any]], max_tokens: int) -> tuple[list[Row], int]:
    """Token ids of the sequences that fit, and how many did not."""
    rows = [
        (prompt_tokens(tokenizer, pair["messages"], "chat"), completion_tokens(tokenizer, pair["completion"]))
        for pair in pairs
    ]
    fitting = [row for row in rows if len(row[0]) + len(row[1]) <= max_tokens]
    return fitting, len(rows) - len(fitting)


def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Right-padded [B, T]; labels are IGNORE on the prompt and on the padding, so neither is learnt."""
    ids = [[*prompt, *completion] for prompt, completion in rows]
    return {
        "input_ids": pad(ids, 0),
        "attention_mask": pad([[1] * len(row) for row in ids], 0),
        "labels": pad([[IGNORE] * len(prompt) + completion for prompt, completion in rows], IGNORE),
    }
