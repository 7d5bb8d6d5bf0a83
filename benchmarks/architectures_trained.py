"""The tiny models of `architectures.py` with adapters, with recomputed activations, and divided among two processes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Sequence
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from benchmarks.tiny_models import COMPLETIONS, PROMPT_ROWS, Gradients, build, expected_of, gradient_error, gradients_of
from grpo.config.common import Hardware, Lora
from grpo.distributed.fsdp import shard
from grpo.distributed.process_group import Parallel
from grpo.model.loading import load_policy
from grpo.model.logprobs import completion_logprobs

TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "phi3",
    "cohere2",
    "granite",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe",
    "olmo2",
    "falcon_h1",
    "mamba2",
    "gpt2",
    "bloom",
)
ADAPTERS = Lora(rank=4, alpha=8)
PROCESSES, PATIENCE = 2, 60.0
"""Of the comparison with one process; seconds that one model may take."""


def lora_error(folder: Path, device: str) -> float:
    """Largest difference of log-probabilities, and of the adapters' gradients (`gradient_error`), from peft's own
    adapters on transformers' own model."""
    policy = load_policy(str(folder), Hardware(device=device), ADAPTERS)  # type: ignore[arg-type]
    wanted = dict(r=ADAPTERS.rank, lora_alpha=ADAPTERS.alpha, target_modules=ADAPTERS.target_modules)
    own = get_peft_model(_own(folder, device), LoraConfig(**wanted, task_type="CAUSAL_LM")).eval()
    others, random = dict(policy.named_parameters()), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in own.named_parameters():
            if weight.requires_grad:
                weight.copy_(torch.randn(weight.shape, generator=random) * weight.shape[-1] ** -0.5)
                others[name].copy_(weight)
    expected, gradients = expected_of(own)
    logprobs, found = _packed(policy)
    return max(_largest(logprobs, expected), gradient_error(gradients, found))


def checkpointing_error(folder: Path, device: str) -> float:
    """As `lora_error`, of a model whose layers recompute their activations."""
    hardware = Hardware(device=device, gradient_checkpointing=True)  # type: ignore[arg-type]
    expected, gradients = expected_of(_own(folder, device))
    logprobs, found = _packed(load_policy(str(folder), hardware).train())
    return max(_largest(logprobs, expected), gradient_error(gradients, found))


def parallel_errors(types: Sequence[str]) -> dict[str, float | str]:
    """For each type, the difference of the gradients of two processes (FSDP2) from one's alone; or what went wrong."""
    errors: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as place:
        for kind in types:
            build(kind, Path(place) / kind)
        while left := [kind for kind in types if kind not in errors]:
            errors |= _compared(left, place)
    return errors


def _compared(types: Sequence[str], place: str) -> dict[str, float | str]:
    """The errors up to the first type that fails: its other process may wait for ever, so the team ends."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    results: Queue[tuple[str, float | str]] = context.Queue()
    team = [
        context.Process(target=_process, args=(rank, port, types, place, results), daemon=True)
        for rank in range(PROCESSES)
    ]
    for process in team:
        process.start()
    errors: dict[str, float | str] = {}
    try:
        for kind in types:
            try:
                name, errors[name] = results.get(timeout=PATIENCE)
            except Empty:
                errors[kind] = f"no answer in {PATIENCE:.0f} s"
            if any(isinstance(found, str) for found in errors.values()):
                break
    finally:
        for process in team:
            process.kill()
            process.join()
    return errors


def _process(rank: int, port: int, types: Sequence[str], place: str, results: Queue[tuple[str, float | str]]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    parallel = Parallel.start(Hardware(device="cpu"))
    for kind in types:
        try:
            found = _sharded_error(f"{place}/{kind}", parallel)
        except Exception as error:
            results.put((kind, f"{type(error).__name__}: {error}"))
            continue
        if parallel.is_main:
            results.put((kind, found))
    parallel.barrier()


def _sharded_error(folder: str, parallel: Parallel) -> float:
    _, gradients = expected_of(_own(Path(folder), "cpu"))
    sharded = shard(load_policy(folder, Hardware(device="cpu")), parallel)
    rows = range(parallel.rank, len(COMPLETIONS), parallel.world)
    prompts, completions = [PROMPT_ROWS[i] for i in rows], [COMPLETIONS[i] for i in rows]
    sharded(completion_logprobs, prompts, completions, 1.0).sum().backward()
    found = {name: _whole(p.grad) for name, p in sharded.model.named_parameters() if p.grad is not None}
    return gradient_error(gradients, found)


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _own(folder: Path, device: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").to(device).eval()


def _packed(policy: Any) -> tuple[Tensor, Gradients]:
    logprobs = completion_logprobs(policy, PROMPT_ROWS, COMPLETIONS, 1.0)
    logprobs.sum().backward()
    return logprobs.detach(), gradients_of(policy)


def _largest(logprobs: Tensor, expected: list[Tensor]) -> float:
    return max((row[: len(e)] - e).abs().max().item() for row, e in zip(logprobs, expected, strict=True))
