"""Sampling by transformers' continuous batching (`generate_batch`): paged key-value caches, and CUDA graphs on a GPU.

The model is the trainer's own, with transformers' attention. On a CPU, equal calls give equal completions, so a job
that was killed and resumed ends with the same bits. On a GPU this is not guaranteed: the free memory determines how
many requests run together. The kernels round differently from the trainer's, so log-probabilities do not count as
exact.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from grpo.config.common import Sampling
from grpo.data.completions import Completion, Ends, each_end
from grpo.distributed.checkpoint import rng_state, set_rng_state
from grpo.errors import InputError, TrainingStopped
from grpo.model.lm_head import base_of
from grpo.model.loading import plain_attention

logger = logging.getLogger(__name__)

CPU_PAGE, CPU_TOKENS = 16, 512
"""Tokens per page and per batch on a CPU, where transformers cannot size the cache by free memory."""


def sample_continuously(
    model: Any,
    prompts: Sequence[Sequence[int]],
    per_prompt: int,
    settings: Sampling,
    *,
    eos_id: Ends,
    seeds: Sequence[int],
    logprobs: bool = True,
) -> Iterator[tuple[int, list[Completion]]]:
    """Like `grpo.generation.sampler.sample_groups`. With `logprobs` false, completions have none, and any top-p is
    allowed.

    Raises TrainingStopped if transformers gives up on a completion.
    """
    if logprobs and settings.top_p < 1:
        raise InputError(
            f"sampling.top_p is {settings.top_p}, but continuous batching reports log-probabilities after the nucleus "
            "cut, and training needs those before it; set top_p to 1, or hardware.sampler to 'own'"
        )
    if not prompts:  # the share of a process when there are fewer prompts than processes
        return
    before = rng_state()
    try:
        with plain_attention(model):
            yield from _groups(base_of(model), prompts, per_prompt, settings, eos_id, seeds, logprobs)
    finally:
        set_rng_state(before)


def _groups(
    model: Any,
    prompts: Sequence[Sequence[int]],
    per_prompt: int,
    settings: Sampling,
    eos_id: Ends,
    seeds: Sequence[int],
    logprobs: bool,
) -> Iterator[tuple[int, list[Completion]]]:
    ends = each_end(eos_id)
    generation = GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        do_sample=True,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=0,
        eos_token_id=ends,
        pad_token_id=ends[0],
        num_return_sequences=per_prompt,
    )
    config = _config(model.device, prompts, per_prompt, settings, seeds, logprobs)
    done: dict[str, dict[str, Completion]] = {}
    with _manager(model, generation, config) as manager:
        names = manager.add_requests(
            inputs=[[*prompt] for prompt in prompts], max_new_tokens=settings.max_new_tokens, record_timestamps=False
        )
        manager.start()
        number_of = {name: number for number, name in enumerate(names)}
        while number_of:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise TrainingStopped("transformers' continuous batching ended before its completions did")
                continue
            if not result.is_finished():
                continue
            if result.error is not None:
                if "out of memory" in result.error.lower():
                    raise torch.OutOfMemoryError(result.error)
                raise TrainingStopped(f"transformers' continuous batching gave a completion up: {result.error}")
            name = result.request_id.split("__child#")[0]
            tokens = [*result.generated_tokens]
            of_group = done.setdefault(name, {})
            of_group[result.request_id] = Completion(tokens, [*result.logprobs], tokens[-1] in ends)
            if len(of_group) == per_prompt:
                yield number_of.pop(name), [of_group[key] for key in sorted(done.pop(name))]


@contextmanager
def _manager(model: Any, generation: GenerationConfig, config: ContinuousBatchingConfig) -> Iterator[Any]:
    """transformers' manager, not yet started. Scheduling is reproducible only if all requests are queued before the
    first batch. `continuous_batching_context_manager` starts the manager first, and its thread takes the requests that
    have arrived so far."""
    manager = model.init_continuous_batching(generation, continuous_batching_config=config)
    try:
        if not manager.warmed_up:
            manager.warmup()
        yield manager
    finally:
        manager.stop(block=True)
        manager.destroy()


def _config(
    device: torch.device,
    prompts: Sequence[Sequence[int]],
    per_prompt: int,
    settings: Sampling,
    seeds: Sequence[int],
    logprobs: bool,
) -> ContinuousBatchingConfig:
    rows = max(per_prompt, min(settings.batch_size, per_prompt * len(prompts)))
    options: dict[str, Any] = {
        "return_logprobs": logprobs,
        "seed": sum(seeds) % 2**31,
        "max_requests_per_batch": rows,
        # Without this package transformers would look for a kernel on the hub.
        "auto_switch_to_flash": importlib.util.find_spec("flash_attn") is not None,
    }
    if device.type == "cpu":
        longest = max(map(len, prompts)) + settings.max_new_tokens
        pages = rows * (-(-longest // CPU_PAGE) + 1)
        options |= {"page_size": CPU_PAGE, "num_blocks": pages, "max_batch_tokens": CPU_TOKENS}
        options |= {"use_cuda_graph": False, "use_async_batching": False}
    return ContinuousBatchingConfig(**options)
