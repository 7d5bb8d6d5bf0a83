"""Supervised fine-tuning: cross-entropy on the tokens of the response (R1, stages 1 and 3b)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo.config.jobs import SFTJob
from grpo.data import token_shards
from grpo.data.conversations import count_demonstrations, demonstrations, files_of
from grpo.data.examples import Example
from grpo.data.template import completions_tokens, opened_reasoning, prompts_tokens
from grpo.data.token_shards import TokenShards
from grpo.distributed.fsdp import compute_dtype
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError
from grpo.model.loading import load_tokenizer, save_tokenizer
from grpo.model.logprobs import completion_logprobs
from grpo.model.sharded.loading import load_sharded
from grpo.processes.metrics_log import write_result
from grpo.training.held_out_loss import HeldOutLoss, hold_out
from grpo.training.supervised import closing_loss, fit, planned_steps


def train_sft(job: SFTJob) -> None:
    """Fine-tunes a model on prompts and completions. Longer sequences are dropped and counted."""
    settings = job.settings
    tokenizer = load_tokenizer(job.model)
    parallel = Parallel.start(settings.hardware)
    examples = tokenized(tokenizer, job.data, job.state / "tokens", settings.max_tokens, parallel)
    if not examples:
        dropped = f"{examples.left_out} dropped"
        raise InputError(f"{job.data}: no sequence fits in max_tokens={settings.max_tokens} ({dropped})")
    learnt, held_out = _validated(tokenizer, job, examples, parallel)
    steps = planned_steps(len(learnt), settings, settings.epochs, settings.max_steps)
    hardware = settings.hardware
    model = load_sharded(job.model, hardware.to_train(), parallel, dtype=compute_dtype(hardware), lora=settings.lora)
    validate = HeldOutLoss(job, model, held_out, cross_entropy) if held_out else None
    done = fit(job, model, learnt, cross_entropy, settings, steps, validate)
    kept = validate.keep(done) if validate else {}
    model.save(job.out)
    if parallel.is_main:
        save_tokenizer(tokenizer, job.model, job.out)
        counts = {"sequences": len(learnt), "too_long": examples.left_out}
        counts |= {"held_out": len(held_out)} if held_out else {}
        metrics = closing_loss(job.metrics) | kept.pop("metrics", {})
        planned = done if validate and validate.selection.stops else steps
        write_result(job.result, done, planned, counts=counts, metrics=metrics, **kept)
    parallel.close()


def tokenized(tokenizer: Any, data: Path, folder: Path, max_tokens: int, parallel: Parallel) -> TokenShards:
    """The sequences of `data` as shards of token ids in `folder`. Creates missing shards. Processes share the work, and
    the tokenizer uses all cores in each process."""
    count = count_demonstrations(data)
    if parallel.is_main:
        kind = json.dumps([tokenizer.get_vocab(), tokenizer.chat_template], sort_keys=True)
        digest = hashlib.sha256(kind.encode()).hexdigest()
        source = {"files": files_of(data), "rows": count, "tokenizer": digest, "max_tokens": max_tokens}
        token_shards.start(folder, source)
    parallel.barrier()
    token_shards.write(
        folder,
        demonstrations(data),
        count,
        lambda rows: tokenize(tokenizer, rows, max_tokens)[0],
        parallel.rank,
        parallel.world,
    )
    parallel.barrier()
    return TokenShards(folder, count)


def _validated(
    tokenizer: Any, job: SFTJob, examples: TokenShards, parallel: Parallel
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Splits into (trained on, held out). Without validation nothing is held out."""
    settings = job.settings
    if settings.validate_every is None:
        return examples, []
    if job.validation_data is None:
        return hold_out(examples, settings.validation.share)
    folder = job.state / "validation-tokens"
    held_out = tokenized(tokenizer, job.validation_data, folder, settings.max_tokens, parallel)
    if not held_out:
        raise InputError(f"{job.validation_data}: no sequence fits in max_tokens={settings.max_tokens}")
    return examples, held_out


def tokenize(tokenizer: Any, pairs: list[dict[str, Any]], max_tokens: int) -> tuple[list[Example], int]:
    """Returns the sequences that fit, and the number of those that do not. `pairs`: rows with `messages` and
    `completion`."""
    prompts = prompts_tokens(tokenizer, [pair["messages"] for pair in pairs])
    opened = [opened_reasoning(tokenizer, prompt) for prompt in prompts]
    completions = completions_tokens(tokenizer, [pair["completion"] for pair in pairs], opened)
    examples = [
        Example([prompt], [completion], weight=len(completion))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    fitting = [example for example in examples if example.tokens <= max_tokens]
    return fitting, len(examples) - len(fitting)


def cross_entropy(model: Any, examples: list[Example]) -> Tensor:
    """Cross-entropy summed over the completions' tokens; prompt tokens have no loss."""
    prompts = [prompt for example in examples for prompt in example.prompts]
    rests = [rest for example in examples for rest in example.rests]
    return -completion_logprobs(model, prompts, rests, temperature=1.0).sum()
