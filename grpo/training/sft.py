"""Supervised fine-tuning: cross-entropy on the tokens of the response (R1, stages 1 and 3b)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from grpo.config.jobs import SFTJob
from grpo.data.conversations import demonstrations
from grpo.data.examples import Example
from grpo.data.template import completion_tokens, opened_reasoning, prompt_tokens
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
    examples, dropped = tokenize(tokenizer, read_pairs(job), settings.max_tokens)
    if not examples:
        raise InputError(f"{job.data}: no sequence fits in max_tokens={settings.max_tokens} ({dropped} dropped)")
    steps = planned_steps(len(examples), settings, settings.epochs, settings.max_steps)
    parallel = Parallel.start(settings.hardware)
    policy = load_policy(job.model, settings.hardware.to_train(), settings.lora)
    model = shard(policy, parallel, dtype=compute_dtype(settings.hardware))
    done = fit(job, model, examples, cross_entropy, settings, steps)
    model.save(job.out)
    if parallel.is_main:
        save_tokenizer(tokenizer, job.model, job.out)
        counts = {"sequences": len(examples), "too_long": dropped}
        write_result(job.result, done, steps, counts=counts, metrics=closing_loss(job.metrics))
    parallel.close()


def read_pairs(job: SFTJob) -> list[dict[str, Any]]:
    """Rows with `messages` and `completion`."""
    return list(demonstrations(job.data))


def tokenize(tokenizer: Any, pairs: list[dict[str, Any]], max_tokens: int) -> tuple[list[Example], int]:
    """Returns the sequences that fit, and the number of those that do not."""
    examples = []
    for pair in pairs:
        prompt = prompt_tokens(tokenizer, pair["messages"], "chat")
        completion = completion_tokens(tokenizer, pair["completion"], opened_reasoning(tokenizer, prompt))
        examples.append(Example([prompt], [completion], weight=len(completion)))
    fitting = [example for example in examples if example.tokens <= max_tokens]
    return fitting, len(examples) - len(fitting)


def cross_entropy(model: Any, examples: list[Example]) -> Tensor:
    """Cross-entropy summed over the completions' tokens; prompts have no loss."""
    prompts = [prompt for example in examples for prompt in example.prompts]
    rests = [rest for example in examples for rest in example.rests]
    return -completion_logprobs(model, prompts, rests, temperature=1.0).sum()
