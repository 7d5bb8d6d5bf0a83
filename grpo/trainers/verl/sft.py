"""SFT by verl: the same sequences in the same batches, the same loss, AdamW with the same rates; its processes and
kernels."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

from grpo.config.common import Hardware
from grpo.config.jobs import SFTJob
from grpo.config.trainers import Verl
from grpo.data.conversations import count_demonstrations
from grpo.data.token_shards import TokenShards
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError, TrainingStopped
from grpo.model.loading import load_tokenizer, save_tokenizer
from grpo.processes.metrics_log import Metrics, replace_text, write_result
from grpo.trainers.verl.checkpoints import CONTENTS, KEPT, Checkpoints
from grpo.trainers.verl.model_input import folder_for_verl
from grpo.trainers.verl.overrides import Value, overrides
from grpo.trainers.verl.plugins import batches
from grpo.trainers.verl.processes import POLL_S, Machine, check_environment, run_processes
from grpo.trainers.verl.records import Records
from grpo.trainers.verl.settings import (
    engine_settings,
    model_settings,
    optimizer_settings,
    rate_share,
    saved_dtype,
    tokens_per_device,
    trainer_settings,
    under,
)
from grpo.training.sft import tokenized
from grpo.training.supervised import batch_at, closing_loss, planned_steps

NAMES = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/lr": "learning_rate"}
"""verl's names of what it measures -> ours."""


def train_sft(job: SFTJob) -> None:
    """Fine-tunes a model on prompts and completions with verl. Longer sequences are dropped and counted. On several
    machines, the first one prepares and publishes; the others run their processes."""
    hardware = job.settings.hardware
    assert hardware.trainer is not None
    check_environment(hardware.trainer)
    folder = job.state / "verl"
    machine = Machine.of_environment(hardware.nodes)
    call = folder / f"command-{machine.meeting}.json"
    if machine.number == 0:
        _lead(job, hardware.trainer, folder, machine, call)
        return
    while not call.exists():  # the launcher ends this process if the first machine's fails
        time.sleep(POLL_S)
    started = json.loads(call.read_text())
    if started["command"]:
        run_processes(started["command"], hardware.processes, machine, started["variables"], lambda: None)


def _lead(job: SFTJob, verl: Verl, folder: Path, machine: Machine, call: Path) -> None:
    settings = job.settings
    hardware = settings.hardware
    call.unlink(missing_ok=True)
    model = folder_for_verl(job.model, hardware)
    tokenizer = load_tokenizer(str(model))
    sequences = _write_batches(job, tokenizer, folder)
    steps = planned_steps(len(sequences), settings, settings.epochs, settings.max_steps)
    checkpoints = Checkpoints(folder / "checkpoints", hardware)
    done = checkpoints.newest()
    metrics = Metrics(job.metrics, done)
    if done < steps:
        longest = int(sequences.tokens().max())
        translated = sft_settings(job, model, folder, checkpoints.folder, longest, steps)
        groups = ["engine=megatron", "optim=megatron"] if verl.megatron else []
        trainer = [str(verl.python), "-m", "verl.trainer.sft_trainer"]
        command = [*trainer, *groups, *overrides(translated), *verl.options]
        first_rate = settings.optimizer.learning_rate * rate_share(done, steps, settings.optimizer)
        records = Records(folder / f"log-after-{done}-{machine.meeting}.jsonl", NAMES, first_rate)

        def hand_on() -> None:
            for step, values in records.new():
                metrics.log(step, steps, **values)

        checkpoints.begin()
        # The process that writes verl's log may be on any machine: with a pipeline, it is on the last.
        replace_text(call, json.dumps({"command": command, "variables": records.variables}))
        run_processes(command, hardware.processes, machine, records.variables, hand_on)
    else:
        replace_text(call, json.dumps({"command": [], "variables": {}}))
    done = checkpoints.newest()
    if done < steps:
        raise TrainingStopped(f"verl ended well after {done} of {steps} steps")
    checkpoints.publish(done, job.out, saved_dtype(hardware), model)
    save_tokenizer(tokenizer, job.model, job.out)
    counts = {"sequences": len(sequences), "too_long": sequences.left_out}
    write_result(job.result, done, steps, counts=counts, metrics=closing_loss(job.metrics))


def sft_settings(
    job: SFTJob, model: Path, folder: Path, checkpoints: Path, longest: int, steps: int
) -> dict[str, Value]:
    """verl's settings for the optimizer steps up to `steps`. `longest`: tokens of the longest sequence. `folder`: of
    the batches."""
    settings, hardware = job.settings, job.settings.hardware
    assert hardware.trainer is not None
    return {
        **under("model", model_settings(model, hardware)),
        **under("engine", engine_settings(hardware.trainer, hardware, job.seed, hardware.to_train().dtype)),
        **under("optim", optimizer_settings(hardware.trainer, settings.optimizer)),
        **_data(folder, settings.batch_size, tokens_per_device(hardware, settings.micro_batch_tokens, longest)),
        **_trainer(job, checkpoints, steps),
    }


def _write_batches(job: SFTJob, tokenizer: object, folder: Path) -> TokenShards:
    """Writes the sequences and the batches, as this library's trainer makes them, for `batches.Batches`."""
    settings = job.settings
    alone = Parallel.start(Hardware(device="cpu"))
    tokens = folder / batches.TOKENS
    sequences = tokenized(tokenizer, job.data, tokens, settings.max_tokens, alone)
    if not sequences:
        dropped = f"{sequences.left_out} dropped"
        raise InputError(f"{job.data}: no sequence fits in max_tokens={settings.max_tokens} ({dropped})")
    size = settings.batch_size
    steps = planned_steps(len(sequences), settings, settings.epochs, settings.max_steps)
    numbers_of = np.full((steps, size), batches.FILLER, np.int64)
    for step in range(steps):
        numbers = batch_at(step, len(sequences), size, job.seed)
        numbers_of[step, : len(numbers)] = numbers
    np.save(folder / batches.BATCHES, numbers_of)
    (folder / batches.ROWS).write_text(str(count_demonstrations(job.data)))
    return sequences


def _data(folder: Path, batch_size: int, tokens: int) -> dict[str, Value]:
    return {
        "data.train_files": str(folder),
        "data.custom_cls.path": batches.__file__,
        "data.custom_cls.name": batches.Batches.__name__,
        "data.train_batch_size": batch_size,
        "data.use_dynamic_bsz": True,
        "data.max_token_len_per_gpu": tokens,
        "data.pad_mode": "no_padding",
        "data.num_workers": 0,
    }


def _trainer(job: SFTJob, checkpoints: Path, steps: int) -> dict[str, Value]:
    return {
        "checkpoint.save_contents": [*CONTENTS],
        **under("trainer", trainer_settings(job.settings.hardware)),
        "trainer.default_local_dir": str(checkpoints),
        "trainer.max_ckpt_to_keep": KEPT,
        "trainer.save_freq": job.settings.save_every,
        "trainer.total_training_steps": steps,
        "trainer.seed": job.seed % 2**32,
        "hydra.run.dir": str(checkpoints.parent / "hydra"),
    }
