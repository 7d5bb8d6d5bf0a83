"""The loop under pretraining, SFT and reward models: transformers.Trainer with our schedule, metrics and resuming."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from grpo.config import Hardware, Optimizer
from grpo.errors import InputError
from grpo.jobs import JobBase
from grpo.optimizer import learning_rate_share, make_optimizer
from grpo.policy import choose_device
from grpo.runlog import Metrics

_COMPLETE = "complete"


class Batches:
    """Collates rows and counts their tokens for the throughput shown."""

    def __init__(self, collate: Callable[[list[Any]], dict[str, Any]]):
        self.collate, self.tokens = collate, 0

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        batch = self.collate(rows)
        self.tokens += sum(int(v.sum()) for k, v in batch.items() if k.endswith("attention_mask"))
        return batch


class _Log(TrainerCallback):
    """Writes each step to metrics.jsonl and marks a checkpoint complete once all of its files are there."""

    def __init__(self, metrics: Metrics, batches: Batches):
        self.metrics, self.batches = metrics, batches
        self.started, self.tokens = time.perf_counter(), 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        now, tokens = time.perf_counter(), self.batches.tokens
        values = {k: v for k, v in logs.items() if k not in ("epoch", "step")}
        rate = (tokens - self.tokens) / (now - self.started)
        self.started, self.tokens = now, tokens
        self.metrics.log(state.global_step, state.max_steps, **values, tokens_per_s=rate)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / _COMPLETE).touch()


def fit(
    job: JobBase,
    model: Any,
    rows: Sequence[Any],
    collate: Callable[[list[Any]], dict[str, Any]],
    *,
    steps: int,
    batch_size: int,
    micro_batch_size: int,
    save_every: int,
    optimizer: Optimizer,
    hardware: Hardware,
    loss: Callable[[Any, dict[str, Any]], torch.Tensor] | None = None,
) -> int:
    """Train `model` in place and return the optimizer steps done. `loss(model, batch)` replaces the model's own."""
    if not rows:
        raise InputError("nothing to train on: every sequence was dropped or the data are empty")
    set_seed(job.seed)
    resume = _last_complete(job.state)
    micro = min(micro_batch_size, batch_size)
    arguments = TrainingArguments(
        output_dir=str(job.state),
        max_steps=steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=math.ceil(batch_size / micro),
        max_grad_norm=optimizer.max_grad_norm,
        save_steps=save_every,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=job.seed,
        use_cpu=choose_device(hardware).type == "cpu",
        bf16=hardware.dtype == "bfloat16",
        gradient_checkpointing=hardware.gradient_checkpointing,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    adamw = make_optimizer(model.parameters(), optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: learning_rate_share(step, steps, optimizer))
    batches = Batches(collate)
    metrics = Metrics(job.metrics, int(resume.name.split("-")[1]) if resume else 0)
    trainer = _Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,  # any indexable with a length will do
        data_collator=batches,
        optimizers=(adamw, schedule),
        callbacks=[_Log(metrics, batches)],
    )
    trainer.replaced_loss = loss
    trainer.remove_callback(_printer())
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer.state.global_step


class _Trainer(Trainer):
    replaced_loss: Callable[[Any, dict[str, Any]], torch.Tensor] | None = None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.replaced_loss is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        value = self.replaced_loss(model, inputs)
        return value / self.args.gradient_accumulation_steps if num_items_in_batch is not None else value


def _printer() -> Any:
    from transformers.trainer_callback import PrinterCallback

    return PrinterCallback


def _last_complete(state: Path) -> Path | None:
    found = sorted(state.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    complete = [path for path in found if (path / _COMPLETE).exists()]
    for path in set(found) - set(complete):
        shutil.rmtree(path)
    return complete[-1] if complete else None
