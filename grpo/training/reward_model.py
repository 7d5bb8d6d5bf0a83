"""Reward models: a scalar head trained on preferences (helpful) or on labels (safe)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from grpo.config.jobs import RewardModelJob
from grpo.config.supervised import RewardModel
from grpo.data.held_out import is_correct, write_held_out
from grpo.distributed.fsdp import Sharded, compute_dtype
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError
from grpo.model.loading import REWARD_MODEL, load_tokenizer, save_tokenizer
from grpo.model.sharded.loading import load_sharded
from grpo.processes.metrics_log import write_result
from grpo.scoring.reward_model import score_sequences
from grpo.training.preferences import Preferences, Row, bootstrap, elements, read_preferences
from grpo.training.supervised import Loss, fit, planned_steps


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """-log sigma(r_w - r_l - margin) for each pair; all tensors are [P]. Ties must have been dropped.

    With a margin: Llama 2 (arXiv 2307.09288), eq. 2. Without: InstructGPT, eq. 1.
    """
    return -logsigmoid(chosen - rejected - margin)


def off_centre(chosen: Tensor, rejected: Tensor) -> Tensor:
    """(r_w + r_l)^2 for each pair, [P]. `bradley_terry` depends only on differences; this term keeps scores around 0
    (arXiv 2312.09244, eq. 2)."""
    return (chosen + rejected).square()


def pointwise(scores: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of logits [B] against labels [B] in {0, 1}, mean over B."""
    return binary_cross_entropy_with_logits(scores, labels)


def pair_loss(scores: Tensor, examples: Sequence[Preferences], margin: float, centring: float) -> Tensor:
    """Sum over examples of the mean over their pairs, so that each prompt has the same weight (InstructGPT, 3.5).
    `scores`: those of all sequences of the examples, in order."""
    chosen: list[int] = []
    rejected: list[int] = []
    strength: list[float] = []
    share: list[float] = []
    first = 0
    for example in examples:
        chosen += [first + i for i in example.chosen]
        rejected += [first + i for i in example.rejected]
        strength += [_strength(row) for row in example.rows]
        share += [1 / len(example.rows)] * len(example.rows)
        first += len(example.prompts)
    better, worse = scores[chosen], scores[rejected]
    losses = bradley_terry(better, worse, margin * scores.new_tensor(strength))
    return ((losses + centring * off_centre(better, worse)) * scores.new_tensor(share)).sum()


def train_reward_model(job: RewardModelJob) -> None:
    """Trains a reward model. Rows whose column `held_out` is true are scored at the end, never trained on."""
    settings = job.settings
    tokenizer = load_tokenizer(job.model)
    rows = read_preferences(job.data, job.loss)
    train, held_out = (elements(tokenizer, part, job.loss, settings.max_tokens) for part in rows)
    dropped = sum(map(len, rows)) - _rows(train) - _rows(held_out)
    if not train:
        raise InputError(f"{job.data}: nothing fits in max_tokens={settings.max_tokens} ({dropped} rows dropped)")
    counts = {"train": len(train), "held_out": len(held_out), "too_long": dropped}
    if job.loss == "pairs":
        counts |= {"train_pairs": _rows(train), "held_out_pairs": _rows(held_out)}
    learnt = bootstrap(train, job.seed) if job.bootstrap else train
    parallel = Parallel.start(settings.hardware)
    torch.manual_seed(job.seed)  # the head is initialized from the seed
    hardware, computed = settings.hardware.to_train(), compute_dtype(settings.hardware)
    sharded = load_sharded(job.model, hardware, parallel, kind=REWARD_MODEL, dtype=computed)
    # Tells transformers at which token this model scores (`up_to_scored`).
    sharded.model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    steps = planned_steps(len(learnt), settings, settings.epochs, settings.max_steps)
    done = fit(job, sharded, learnt, _LOSSES[job.loss](settings), settings, steps)
    scored = _score(sharded, held_out, settings.micro_batch_tokens) if held_out else []
    sharded.save(job.out)
    if parallel.is_main:
        save_tokenizer(tokenizer, job.model, job.out)
        if scored:
            write_held_out(job.out, scored)
        metrics = {"held_out_accuracy": sum(map(is_correct, scored)) / len(scored)} if scored else {}
        write_result(job.result, done, steps, counts=counts, metrics=metrics)
    parallel.close()


def _pair_loss(settings: RewardModel, model: Any, examples: list[Any]) -> Tensor:
    return pair_loss(_scores(model, examples), examples, settings.margin, settings.centring)


def _point_loss(settings: RewardModel, model: Any, examples: list[Any]) -> Tensor:
    scores = _scores(model, examples)
    return pointwise(scores, scores.new_tensor([example.label for example in examples])) * len(examples)


_LOSSES: dict[str, Callable[[RewardModel], Loss]] = {
    "pairs": lambda settings: functools.partial(_pair_loss, settings),
    "points": lambda settings: functools.partial(_point_loss, settings),
}


def _scores(model: Any, examples: Sequence[Preferences]) -> Tensor:
    prompts = [prompt for example in examples for prompt in example.prompts]
    return score_sequences(model, prompts, [rest for example in examples for rest in example.rests])


def _strength(row: Row) -> float:
    return 1.0 if row.get("strength") is None else float(row["strength"])


def _rows(examples: Sequence[Preferences]) -> int:
    return sum(len(example.rows) for example in examples)


@torch.inference_mode()
def _score(model: Sharded, examples: Sequence[Preferences], max_tokens: int) -> list[Row]:
    """Rows of the examples, in order, with their scores. Each process scores its share of the batches."""
    batches: list[list[Preferences]] = []
    room = 0
    for example in examples:
        if example.tokens > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(example)
        room -= example.tokens
    parallel = model.parallel
    own = parallel.map_together(lambda batch: model(_scores, batch).tolist(), parallel.deal(batches), batches[0])
    rows: list[Row] = []
    for batch, scores in zip(batches, parallel.collect(own), strict=True):
        left = iter(scores)
        for example in batch:
            rows += _scored(example, [next(left) for _ in example.prompts])
    return rows


def _scored(example: Preferences, scores: list[float]) -> list[Row]:
    if not example.chosen:
        return [{**row, "score": scores[0]} for row in example.rows]
    both = zip(example.rows, example.chosen, example.rejected, strict=True)
    return [{**row, "chosen_score": scores[won], "rejected_score": scores[lost]} for row, won, lost in both]
