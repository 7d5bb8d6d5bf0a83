"""SFT by verl: the same sequences in the same batches, the same loss, AdamW with the same rates; its processes and
kernels."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import numpy as np

from grpo.config.common import Hardware, Optimizer
from grpo.config.jobs import SFTJob
from grpo.config.trainers import Verl
from grpo.data.conversations import count_demonstrations
from grpo.data.token_shards import TokenShards
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError, TrainingStopped
from grpo.model.loading import load_tokenizer, save_tokenizer
from grpo.model_folder import check_model_folder, hub_snapshot
from grpo.processes.metrics_log import Metrics, replace_text, write_result
from grpo.trainers.verl import dataset
from grpo.trainers.verl.overrides import Value, overrides
from grpo.trainers.verl.processes import POLL_S, Machine, check_environment, run_processes
from grpo.trainers.verl.records import Records
from grpo.training.optimizer import learning_rate_share
from grpo.training.sft import tokenized
from grpo.training.supervised import batch_at, closing_loss, planned_steps

PRECISION = {"float32": "fp32", "bfloat16": "bf16"}
"""Our names of data types -> verl's."""
_TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file with the step of the newest complete checkpoint."""


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
    if command := json.loads(call.read_text()):
        run_processes(command, hardware.processes, machine, {}, lambda: None)


def _lead(job: SFTJob, verl: Verl, folder: Path, machine: Machine, call: Path) -> None:
    settings = job.settings
    hardware = settings.hardware
    call.unlink(missing_ok=True)
    model = hub_snapshot(job.model)
    check_model_folder(model, hardware.remote_code)  # verl would also read weights that can run code
    tokenizer = load_tokenizer(str(model))
    sequences = _write_batches(job, tokenizer, folder)
    steps = planned_steps(len(sequences), settings, settings.epochs, settings.max_steps)
    checkpoints, world = folder / "checkpoints", hardware.processes * hardware.nodes
    done = _checkpointed(checkpoints, world)
    metrics = Metrics(job.metrics, done)
    if done < steps:
        longest = int(sequences.tokens().max())
        translated = {
            **_model_and_engine(job, model, verl),
            **_optimizer(settings.optimizer),
            **_data(folder, settings.batch_size, max(settings.micro_batch_tokens, longest)),
            **_trainer(job, checkpoints, steps),
        }
        command = [str(verl.python), "-m", "verl.trainer.sft_trainer", *overrides(translated), *verl.options]
        log = folder / f"log-after-{done}-{machine.meeting}.jsonl"
        first_rate = settings.optimizer.learning_rate * _share(done, steps, settings.optimizer)
        log.unlink(missing_ok=True)
        records = Records(log, metrics, steps, first_rate)
        own = {"VERL_FILE_LOGGER_PATH": str(log)}
        replace_text(call, json.dumps(command))
        run_processes(command, hardware.processes, machine, own, records.hand_on)
    else:
        replace_text(call, "[]")
    done = _checkpointed(checkpoints, world)
    if done < steps:
        raise TrainingStopped(f"verl ended well after {done} of {steps} steps")
    _publish(checkpoints / f"global_step_{done}" / "huggingface", job.out, hardware.to_train().dtype)
    save_tokenizer(tokenizer, job.model, job.out)
    counts = {"sequences": len(sequences), "too_long": sequences.left_out}
    write_result(job.result, done, steps, counts=counts, metrics=closing_loss(job.metrics))


def _write_batches(job: SFTJob, tokenizer: object, folder: Path) -> TokenShards:
    """Writes the sequences and the batches, as this library's trainer makes them, for `dataset.Batches`."""
    settings = job.settings
    alone = Parallel.start(Hardware(device="cpu"))
    tokens = folder / dataset.TOKENS
    sequences = tokenized(tokenizer, job.data, tokens, settings.max_tokens, alone)
    if not sequences:
        dropped = f"{sequences.left_out} dropped"
        raise InputError(f"{job.data}: no sequence fits in max_tokens={settings.max_tokens} ({dropped})")
    size = settings.batch_size
    steps = planned_steps(len(sequences), settings, settings.epochs, settings.max_steps)
    batches = np.full((steps, size), dataset.FILLER, np.int64)
    for step in range(steps):
        numbers = batch_at(step, len(sequences), size, job.seed)
        batches[step, : len(numbers)] = numbers
    np.save(folder / dataset.BATCHES, batches)
    (folder / dataset.ROWS).write_text(str(count_demonstrations(job.data)))
    return sequences


def _model_and_engine(job: SFTJob, model: Path, verl: Verl) -> dict[str, Value]:
    hardware = job.settings.hardware
    packed = hardware.device != "cpu" and hardware.attention != "plain"  # verl packs with flash-attn alone
    arithmetic = PRECISION[hardware.dtype]
    precision: dict[str, Value] = {"param_dtype": arithmetic, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    return {
        "model.path": str(model),
        "model.trust_remote_code": hardware.remote_code,
        "model.enable_gradient_checkpointing": hardware.gradient_checkpointing,
        "model.use_remove_padding": packed,
        **({} if packed else {"+model.override_config.attn_implementation": "sdpa"}),
        "engine.strategy": verl.strategy,
        "engine.model_dtype": PRECISION[hardware.to_train().dtype],
        "engine.dtype": hardware.dtype,
        "+engine.mixed_precision": precision,
        "engine.ulysses_sequence_parallel_size": hardware.sequence_parallel,
        "engine.use_torch_compile": hardware.fused and hardware.device != "cpu",
        "engine.seed": job.seed % 2**32,
    }


def _optimizer(optimizer: Optimizer) -> dict[str, Value]:
    return {
        "optim.lr": optimizer.learning_rate,
        "optim.betas": [0.9, optimizer.adam_beta2],
        "optim.weight_decay": optimizer.weight_decay,
        "optim.clip_grad": optimizer.max_grad_norm,
        "optim.lr_scheduler_type": "cosine",
        "optim.min_lr_ratio": optimizer.final_learning_rate_share,
        "optim.lr_warmup_steps": optimizer.warmup_steps,
        # Counted from 0, verl's first step of a warm-up has a rate of zero. Counted from 1, its decay is a step ahead.
        "optim.zero_indexed_step": optimizer.warmup_steps == 0,
    }


def _share(step: int, steps: int, optimizer: Optimizer) -> float:
    """Share of the peak learning rate that verl takes at step `step`, counted from 0, with these settings."""
    ahead = optimizer.warmup_steps > 0 and step >= optimizer.warmup_steps
    return learning_rate_share(step + ahead, steps, optimizer)


def _data(folder: Path, batch_size: int, tokens: int) -> dict[str, Value]:
    return {
        "data.train_files": str(folder),
        "data.custom_cls.path": dataset.__file__,
        "data.custom_cls.name": dataset.Batches.__name__,
        "data.train_batch_size": batch_size,
        "data.use_dynamic_bsz": True,
        "data.max_token_len_per_gpu": tokens,
        "data.pad_mode": "no_padding",
        "data.num_workers": 0,
    }


def _trainer(job: SFTJob, checkpoints: Path, steps: int) -> dict[str, Value]:
    hardware = job.settings.hardware
    return {
        "checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        "trainer.device": hardware.device if hardware.device != "auto" else "cuda",
        "trainer.n_gpus_per_node": hardware.processes,
        "trainer.nnodes": hardware.nodes,
        "trainer.default_local_dir": str(checkpoints),
        "trainer.max_ckpt_to_keep": 2,  # the older one goes after the newer is written
        "trainer.save_freq": job.settings.save_every,
        "trainer.resume_mode": "auto",
        "trainer.total_epochs": 1,  # of data that have the batches of all epochs
        "trainer.total_training_steps": steps,
        "trainer.logger": ["file"],
        "trainer.seed": job.seed % 2**32,
        "hydra.run.dir": str(checkpoints.parent / "hydra"),
    }


def _checkpointed(checkpoints: Path, processes: int) -> int:
    """The step of the newest checkpoint, 0 without one. Raises InputError if another number of processes wrote it."""
    tracker = checkpoints / _TRACKER
    if not tracker.is_file():
        return 0
    if not (text := tracker.read_text().strip()).isdecimal():  # verl could not read it either
        tracker.unlink()
        return 0
    step = int(text)
    names = [path.name for path in (checkpoints / f"global_step_{step}").glob("model_world_size_*_rank_0.pt")]
    wrote = [int(re.findall(r"\d+", name)[0]) for name in names]
    if wrote and processes not in wrote:
        raise InputError(
            f"hardware.processes * hardware.nodes is {processes}, but {wrote[0]} processes wrote verl's checkpoint of "
            f"step {step}, and verl goes on with as many only; set them so, or begin again with --force"
        )
    return step


def _publish(written: Path, out: Path, dtype: str) -> None:
    """Puts the model that verl wrote into the job's output, its weights as links where the file system has them."""
    weights = [*written.glob("*.safetensors")]
    if not weights:
        raise TrainingStopped(f"verl wrote no model to {written}")
    for path in [*weights, *written.glob("*.safetensors.index.json"), *written.glob("generation_config.json")]:
        (out / path.name).unlink(missing_ok=True)
        try:
            os.link(path, out / path.name)
        except OSError:
            shutil.copyfile(path, out / path.name)
    config = json.loads((written / "config.json").read_text())
    config["dtype"] = dtype  # verl says bfloat16 whatever it wrote
    replace_text(out / "config.json", json.dumps(config, indent=2) + "\n")
