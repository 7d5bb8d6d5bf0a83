"""Sampling requests to vLLM, in process and over HTTP, and checks of their settings."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from grpo.config.common import Sampling
from grpo.data.completions import Ends, each_end
from grpo.errors import InputError

LOGPROBS = "processed_logprobs"
"""vLLM's mode that reports log-probabilities at the sampling temperature; its default ignores the temperature."""
COLDEST = 0.01


def check(prompts: Sequence[Sequence[int]], settings: Sampling, longest: int, logprobs: bool) -> None:
    """Raises InputError for settings that vLLM would silently handle differently."""
    if logprobs and settings.top_p < 1:
        raise InputError(
            f"sampling.top_p is {settings.top_p}, but vLLM reports log-probabilities after the nucleus cut, and "
            "training needs those before it; set top_p to 1, or sample without vLLM"
        )
    if settings.temperature < COLDEST:
        raise InputError(f"sampling.temperature is {settings.temperature}; vLLM samples at {COLDEST} or more")
    needed = max(map(len, prompts), default=0) + settings.max_new_tokens
    if needed > longest:
        raise InputError(
            f"vllm: the longest prompt with max_new_tokens needs {needed} tokens, but vLLM takes {longest} "
            "(max_model_len, or what its KV cache holds); raise that, or shorten prompts or completions"
        )


def check_ahead(samplings: Iterable[Sampling], longest: int) -> None:
    """`check` before the first prompt is known, so that a setting that is reached late fails at once."""
    for each in samplings:
        check([[0]], each, longest, logprobs=False)


def parameters(per_prompt: int, settings: Sampling, eos_id: Ends, seed: int, logprobs: bool) -> dict[str, Any]:
    """Fields of vLLM's SamplingParams. Everything that changes the distribution is set explicitly: a server takes
    missing fields from the model's generation_config.json."""
    return {
        "n": per_prompt,
        "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed,
        # Only these tokens end a completion, even if the model's folder names others.
        "ignore_eos": True,
        "stop_token_ids": each_end(eos_id),
        "logprobs": 0 if logprobs else None,
        "detokenize": False,
    }


def prompt_seed(seed: int) -> int:
    """Spreads seeds: vLLM adds 1, 2, ... to a prompt's seed for its completions, so two prompts' seeds must be far
    apart."""
    digest = hashlib.blake2b(str(seed).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def chunked_prefill() -> bool:
    """Whether vLLM may split long prompts. On a CPU, vLLM 0.32 crashes on a split prompt with a seed: it rewinds the
    random generator after each part, which CPU generators do not support."""
    return not importlib.import_module("vllm.platforms").current_platform.is_cpu()
