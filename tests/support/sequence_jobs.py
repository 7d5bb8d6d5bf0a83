"""What the processes of tests/grpo/distributed/test_sequence_parallel.py do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from grpo.config.common import Hardware, Lora
from grpo.distributed.process_group import Parallel, _sequence_group
from grpo.errors import InputError
from grpo.model.loading import prepare_training
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed.shared_tokens import sharing_tokens
from grpo.model.sharded.loading import load_sharded
from grpo.model.value_head import Value, values_of
from tests.support.parallel_jobs import sequences
from tests.support.shard_jobs import PeakMemory

PROMPTS = [[5, 6, 7]] * 3 + [[8, 9]] * 3 + [[4], [*range(3, 15)]]
"""Of eight completions: two prompts are shared. The last one is long, so that a process may have no token of its
completion."""
COMPLETIONS = [*sequences(3), [9]]


def gradients(parallel: Parallel, folder: str, size: int, hardware: dict[str, Any], lora: bool = False) -> Any:
    """Log-probabilities of eight completions and gradients of their weighted sum. `size` processes share the tokens of
    a micro-batch; the groups divide four micro-batches."""
    parallel = replace(parallel, sequence=_sequence_group(parallel.rank, parallel.world, size))
    settings = Hardware(device="cpu", **hardware)
    adapters = Lora(rank=2, alpha=4) if lora else None
    torch.manual_seed(0)
    sharded = load_sharded(folder, settings, parallel, lora=adapters)
    prepare_training(sharded.model, folder, settings)
    sharded.model.train()
    logprobs = torch.zeros(len(COMPLETIONS), max(map(len, COMPLETIONS)))
    for number, rows in enumerate(([0, 1, 3], [2, 4, 6], [7], [5])):
        counts = number % parallel.data_world == parallel.data_rank
        chosen = rows if counts else [6]
        with sharing_tokens(parallel.sequence):
            found = sharded(completion_logprobs, [PROMPTS[i] for i in chosen], [COMPLETIONS[i] for i in chosen], 1.0)
        weights = torch.tensor([1.0 + i for i in chosen])[:, None]
        ((found * weights).sum() * counts).backward()
        if counts and parallel.reports:
            logprobs[rows, : found.shape[1]] = found.detach()
    whole = sum(torch.from_numpy(part) for part in parallel.all_gather(logprobs.numpy()))
    return whole.numpy(), {  # type: ignore[union-attr]
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).numpy()
        for name, p in sharded.model.named_parameters()
        if p.grad is not None
    }


def tokens_in_mlp(parallel: Parallel, folder: str, size: int) -> int:
    """Tokens that this process runs through the first MLP for all completions in one micro-batch."""
    parallel = replace(parallel, sequence=_sequence_group(parallel.rank, parallel.world, size))
    sharded = load_sharded(folder, Hardware(device="cpu"), parallel)
    seen: list[int] = []
    mlp = next(module for name, module in sharded.model.named_modules() if name.endswith("layers.0.mlp"))
    mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-2]))
    with sharing_tokens(parallel.sequence):
        sharded(completion_logprobs, PROMPTS, COMPLETIONS, 1.0).sum().backward()
    return seen[0]


def peak_bytes(parallel: Parallel, folder: str, size: int, tokens: int) -> int:
    """Peak memory of a forward and backward pass over one sequence of so many tokens."""
    parallel = replace(parallel, sequence=_sequence_group(parallel.rank, parallel.world, size))
    sharded = load_sharded(folder, Hardware(device="cpu"), parallel)
    completion = [3 + i % 90 for i in range(tokens)]

    def step(length: int) -> None:
        with sharing_tokens(parallel.sequence):
            sharded(completion_logprobs, [[1, 2]], [completion[:length]], 1.0).sum().backward()

    step(64)  # loads what a step needs
    with PeakMemory() as peak:
        step(tokens)
    return peak.bytes


def values(parallel: Parallel, folder: str, size: int) -> Any:
    """PPO's values of the completions, by a head on the policy's backbone, and the head's gradient."""
    parallel = replace(parallel, sequence=_sequence_group(parallel.rank, parallel.world, size))
    sharded = load_sharded(folder, Hardware(device="cpu"), parallel)

    def run(model: Any) -> Any:
        value = Value(model.base_model, own_backbone=False)
        torch.nn.init.constant_(value.head.weight, 0.5)
        with sharing_tokens(parallel.sequence):
            found = values_of(value, PROMPTS, COMPLETIONS)
        found.square().sum().backward()
        gradient = value.head.weight.grad
        assert gradient is not None
        return found.detach().numpy(), sum(torch.from_numpy(g) for g in parallel.all_gather(gradient.numpy())).numpy()  # type: ignore[union-attr]

    return sharded(run)


def refusal(parallel: Parallel, folder: str, size: int, hardware: dict[str, Any]) -> str:
    """What is said of a model whose sequences cannot be shared."""
    parallel = replace(parallel, sequence=_sequence_group(parallel.rank, parallel.world, size))
    try:
        load_sharded(folder, Hardware(device="cpu", **hardware), parallel)
    except InputError as error:
        return str(error)
    return "not refused"
