"""The training loop of pretraining, SFT and reward models: packed batches of examples in an order fixed by the seed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo.config.jobs import JobBase
from grpo.config.supervised import Supervised
from grpo.data.examples import Example
from grpo.data.permutation import permutation
from grpo.distributed import checkpoint
from grpo.distributed.fsdp import Sharded, clip_grad_norm
from grpo.distributed.process_group import divide
from grpo.distributed.sequence_group import sharing_tokens
from grpo.errors import InputError, TrainingStopped
from grpo.health.checks import GradientSpike, Health, HealthSettings, NotFinite
from grpo.model.lm_head import backbone_of
from grpo.model.packed.attention import is_packed
from grpo.model.packed.ordered_gradients import ordered_gradients
from grpo.model.packed.packing import micro_batches
from grpo.processes.metrics_log import Metrics, closing_means
from grpo.processes.save_clock import SaveClock
from grpo.processes.stop_request import StopRequest
from grpo.training.held_out_loss import HeldOutLoss
from grpo.training.optimizer import learning_rate_share, make_optimizer, step_if_finite, trained
from grpo.training.totals import Totals

logger = logging.getLogger(__name__)

SKIPPED_MAX = 3
"""Steps in a row without a finite loss and gradient that end training. Ours."""
Loss = Callable[[Any, list[Example]], Tensor]
"""(model, examples) -> the sum of their losses; the loop divides it by the weight of the whole batch."""


def planned_steps(examples: int, settings: Supervised, epochs: int, max_steps: int | None) -> int:
    """Number of optimizer steps. The last batch of an epoch may be smaller."""
    steps = epochs * -(-examples // settings.batch_size)
    return min(steps, max_steps or steps)


def fit(
    job: JobBase,
    model: Sharded,
    examples: Sequence[Example],
    loss: Loss,
    settings: Supervised,
    steps: int,
    validate: HeldOutLoss | None = None,
) -> int:
    """Trains `model` in place. Returns the number of optimizer steps; `validate` may stop early.

    A step whose loss or gradient is not finite does not move the weights. Raises TrainingStopped if several in a row do
    not.
    """
    if not examples:
        raise InputError("nothing to train on: every sequence was dropped or the data are empty")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(trained(model, settings.optimizer), settings.optimizer)
    parallel, kept = model.parallel, ({"model": model}, {"adamw": optimizer})
    selection = validate and validate.selection
    latest = checkpoint.load_latest(parallel, job.state, *kept, selection.needed if selection else None)
    step = latest[0] if latest else 0
    if selection and latest:
        selection.restore(latest[1].get("validation"))
    metrics = Metrics(job.metrics, step) if parallel.is_main else None
    packed = float(is_packed(backbone_of(model.model)))
    model.train()
    clock, health = SaveClock(), _health(steps)
    with StopRequest() as request:
        while step < steps and not (selection and selection.stops):
            started = time.perf_counter()
            batch = [examples[i] for i in batch_at(step, len(examples), settings.batch_size, job.seed)]
            rate = settings.optimizer.learning_rate * learning_rate_share(step, steps, settings.optimizer)
            for group in optimizer.param_groups:
                group["lr"] = rate
            total = _backward(model, batch, loss, settings.micro_batch_tokens)
            norm = clip_grad_norm(parameters, settings.optimizer.max_grad_norm)
            moved = step_if_finite(optimizer, (total, norm))
            step += 1
            tokens = sum(example.tokens for example in batch) / (time.perf_counter() - started)
            measured = validate(step) if validate and validate.due(step, steps) else {}
            if metrics is not None:
                record = {"loss": total, "grad_norm": norm, "learning_rate": rate, "tokens_per_s": tokens}
                skipped = {} if moved else {"skipped": 1.0}
                metrics.log(step, steps, **record, **measured, **skipped, packed=packed)
            if not moved:  # on every process: the one that is heard need not write the metrics
                logger.warning("step %d was skipped: loss %s, gradient norm %s", step, total, norm)
            for event in health.check(step, {"loss": total, "grad_norm": norm}):
                raise TrainingStopped(f"{event.name}: {event.message}")
            goes_on = step < steps and not (selection and selection.stops)
            stops, due = parallel.any(request.asked), parallel.broadcast(clock.due)
            # After a skipped step only at a stop: if all that follow are skipped, too, it is no state to return to.
            if goes_on and (stops or (moved and (due or step % settings.save_every == 0))):
                state = {"validation": selection.state()} if selection else {}
                with clock.saving():
                    checkpoint.save(parallel, job.state, step, *kept, state)
                if selection:
                    selection.saved()
            if goes_on and stops:
                request.end()
    model.eval()
    return step


def _health(steps: int) -> Health:
    """Stops a job of so many steps if the last of them moved nothing; the other checks are RL's."""
    not_finite = NotFinite(action="stop", steps=min(SKIPPED_MAX, steps))
    return Health(HealthSettings(not_finite=not_finite, gradient_spike=GradientSpike(action="ignore")))


def closing_loss(metrics: Path) -> dict[str, float]:
    """The loss at the end of training, for the job's result."""
    return closing_means(metrics, lambda name: name == "loss")


def batch_at(step: int, examples: int, size: int, seed: int) -> list[int]:
    """The numbers of the examples in batch number `step`. Every epoch goes through all of them in a new order."""
    epoch, number = divmod(step, -(-examples // size))
    return permutation(examples, f"{seed}/{epoch}")[number * size : (number + 1) * size]


def _backward(model: Sharded, batch: list[Example], loss: Loss, max_tokens: int) -> float:
    """Computes gradients of the batch's mean loss and returns that loss. Each process does its share of the
    micro-batches."""
    prompts = [prompt for example in batch for prompt in example.prompts]
    rests = [rest for example in batch for rest in example.rests]
    units: list[list[int]] = []
    for example in batch:
        first = units[-1][-1] + 1 if units else 0
        units.append([*range(first, first + len(example.prompts))])
    weight = sum(example.weight for example in batch)
    parts = micro_batches(prompts, rests, units, max_tokens)
    parallel = model.parallel
    shares = divide([sum(batch[number].tokens for number in part) for part in parts], parallel.data_world)
    mine = [[batch[number] for number in parts[i]] for i in shares[parallel.data_rank]]
    totals = Totals()
    for part in mine:
        with sharing_tokens(parallel.sequence):
            value = model(loss, part) / weight
        with ordered_gradients(parallel.device):
            value.backward()
        if parallel.reports:
            totals.add({"loss": value})
    for _ in range(max(map(len, shares)) - len(mine)):  # all processes must call the model equally often
        with ordered_gradients(parallel.device), sharing_tokens(parallel.sequence):
            (model(loss, [min(batch, key=lambda example: example.tokens)]) * 0).backward()
    return parallel.reduce({"loss": 0.0, **totals.read()})["loss"]
