"""Supervised fine-tuning: cross-entropy on the tokens of the response (R1, stages 1 and 3b)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import Tensor

from grpo.config.jobs import SFTJob
from grpo.data import token_shards
from grpo.data.conversations import count_demonstrations, demonstrations, files_of
from grpo.data.examples import Example
from grpo.data.template import completions_tokens, opened_reasoning, prompts_tokens
from grpo.data.token_shards import TokenShards
from grpo.distributed.fsdp import compute_dtype, shard
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError
from grpo.model.loading import load_policy, load_tokenizer, save_tokenizer
from grpo.model.logprobs import completion_logprobs
from grpo.processes.metrics_log import write_result
from grpo.training.supervised import closing_loss, fit, planned_steps


def train_sft(job: SFTJob) -> None:
    """Fine-tunes a model on prompts and completions. Longer sequences are dropped and counted."""
    settings = job.settings
    tokenizer = load_tokenizer(job.model)
    parallel = Parallel.start(settings.hardware)
    examples = tokenized(tokenizer, job, parallel)
    if not examples:
        dropped = f"{examples.left_out} dropped"
        raise InputError(f"{job.data}: no sequence fits in max_tokens={settings.max_tokens} ({dropped})")
    steps = planned_steps(len(examples), settings, settings.epochs, settings.max_steps)
    policy = load_policy(job.model, settings.hardware.to_train(), settings.lora)
    model = shard(policy, parallel, dtype=compute_dtype(settings.hardware))
    done = fit(job, model, examples, cross_entropy, settings, steps)
    model.save(job.out)
    if parallel.is_main:
        save_tokenizer(tokenizer, job.model, job.out)
        counts = {"sequences": len(examples), "too_long": examples.left_out}
        write_result(job.result, done, steps, counts=counts, metrics=closing_loss(job.metrics))
    parallel.close()


def tokenized(tokenizer: Any, job: SFTJob, parallel: Parallel) -> TokenShards:
    """The data's sequences, in shards of token ids in `job.state`, which this makes where they are missing. Processes
    share the work, and the tokenizer uses all cores in each."""
    folder, count, longest = job.state / "tokens", count_demonstrations(job.data), job.settings.max_tokens
    if parallel.is_main:
        kind = json.dumps([tokenizer.get_vocab(), tokenizer.chat_template], sort_keys=True)
        digest = hashlib.sha256(kind.encode()).hexdigest()
        source = {"files": files_of(job.data), "rows": count, "tokenizer": digest, "max_tokens": longest}
        token_shards.start(folder, source)
    parallel.barrier()
    token_shards.write(
        folder,
        demonstrations(job.data),
        count,
        lambda rows: tokenize(tokenizer, rows, longest)[0],
        parallel.rank,
        parallel.world,
    )
    parallel.barrier()
    return TokenShards(folder, count)


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
    """Cross-entropy summed over the completions' tokens; prompts have no loss."""
    prompts = [prompt for example in examples for prompt in example.prompts]
    rests = [rest for example in examples for rest in example.rests]
    return -completion_logprobs(model, prompts, rests, temperature=1.0).sum()
