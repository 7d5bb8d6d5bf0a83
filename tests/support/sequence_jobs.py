"""What the processes of test_sequence_parallel.py and test_tensor_parallel.py do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers.models.llama.modeling_llama import LlamaMLP

from grpo.config.common import Hardware, Lora, Optimizer
from grpo.distributed import checkpoint
from grpo.distributed.fsdp import clip_grad_norm, compute_dtype, local
from grpo.distributed.process_group import Parallel, sequence_group_of
from grpo.distributed.sequence_group import sharing_tokens
from grpo.errors import InputError
from grpo.model.loading import prepare_training
from grpo.model.logprobs import completion_logprobs
from grpo.model.sharded.loading import load_sharded
from grpo.model.value_head import Value, values_of
from grpo.training.optimizer import make_optimizer
from tests.support.float64 import Float64
from tests.support.parallel_jobs import ALONE, Team, sequences
from tests.support.shard_jobs import PeakMemory

PROMPTS = [[5, 6, 7]] * 3 + [[8, 9]] * 3 + [[4], [*range(3, 15)]]
"""Of eight completions: two prompts are shared. The last one is long, so that a process may have no token of its
completion."""
COMPLETIONS = [*sequences(3), [9]]


def sharing(parallel: Parallel, hardware: Hardware) -> Parallel:
    return replace(parallel, sequence=sequence_group_of(parallel.rank, parallel.world, hardware))


def gradients(
    parallel: Parallel,
    folder: str,
    size: int,
    hardware: dict[str, Any],
    lora: bool = False,
    kind: str = "sequence_parallel",
    float64: bool = False,
) -> Any:
    """Log-probabilities of eight completions and gradients of their weighted sum. `size` processes share the tokens of
    a micro-batch; the groups divide four micro-batches."""
    settings = Hardware(device="cpu", processes=parallel.world, **{kind: size}, **hardware)
    if float64:
        with Float64():
            return _gradients(parallel, folder, settings.model_copy(update={"dtype": "float64"}), lora)
    return _gradients(parallel, folder, settings, lora)


def _gradients(parallel: Parallel, folder: str, settings: Hardware, lora: bool) -> Any:
    parallel = sharing(parallel, settings)
    adapters = Lora(rank=2, alpha=4) if lora else None
    torch.manual_seed(0)
    sharded = load_sharded(folder, settings, parallel, lora=adapters)
    prepare_training(sharded.model, folder, settings)
    sharded.model.train()
    logprobs = torch.zeros(len(COMPLETIONS), max(map(len, COMPLETIONS)), dtype=getattr(torch, settings.dtype))
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
    parallel = sharing(parallel, Hardware(device="cpu", processes=parallel.world, sequence_parallel=size))
    sharded = load_sharded(folder, Hardware(device="cpu"), parallel)
    seen: list[int] = []
    mlp = next(module for name, module in sharded.model.named_modules() if name.endswith("layers.0.mlp"))
    mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-2]))
    with sharing_tokens(parallel.sequence):
        sharded(completion_logprobs, PROMPTS, COMPLETIONS, 1.0).sum().backward()
    return seen[0]


def peak_bytes(parallel: Parallel, folder: str, size: int, tokens: int) -> int:
    """Peak memory of a forward and backward pass over one sequence of so many tokens."""
    parallel = sharing(parallel, Hardware(device="cpu", processes=parallel.world, sequence_parallel=size))
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
    parallel = sharing(parallel, Hardware(device="cpu", processes=parallel.world, sequence_parallel=size))
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


def weights_used(parallel: Parallel, folder: str, names: list[str]) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shape of the last weight that each module of a block, named by its end, has while pairs of processes divide it,
    and the number of tokens that it gets."""
    settings = Hardware(device="cpu", processes=parallel.world, tensor_parallel=2)
    parallel = sharing(parallel, settings)
    sharded = load_sharded(folder, settings, parallel)
    used: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, module in sharded.model.named_modules():
        if (end := next((end for end in names if name.endswith(end)), None)) is None:
            continue

        def look(called: Any, inputs: Any, end: str = end) -> None:
            weight = [*called.parameters(recurse=False)][-1]
            used[end] = tuple(local(weight).shape), inputs[0].shape[-2]

        module.register_forward_pre_hook(look)  # after the last module of a block FSDP has dropped gathered weights
    with sharing_tokens(parallel.sequence):
        sharded(completion_logprobs, PROMPTS, COMPLETIONS, 1.0).sum().backward()
    return used


def assert_gradients_of_one_process(
    team: Team,
    folder: Path,
    size: int,
    hardware: dict[str, Any],
    lora: bool = False,
    kind: str = "sequence_parallel",
    float64: bool = False,
) -> None:
    """`gradients` of a team, of which `size` processes share, are those of one process, up to rounding."""
    logprobs, expected = gradients(ALONE, str(folder), 1, hardware, lora, kind, float64)
    largest = max(float(np.abs(gradient).max()) for gradient in expected.values())
    assert largest > 0.1
    rounding = 1e-13 if float64 else 1e-6 * max(3, len(team.processes))  # each process adds to the sums
    for found, shared in team(gradients, str(folder), size, hardware, lora, kind, float64):
        np.testing.assert_allclose(found, logprobs, atol=2 * rounding, rtol=0)
        assert shared.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient.dtype == (np.float64 if float64 else np.float32)
            np.testing.assert_allclose(shared[name], gradient, rtol=0, atol=rounding * max(1.0, largest), err_msg=name)


def mixed(parallel: Parallel, folder: str, size: int) -> Any:
    """Log-probabilities in bfloat16 arithmetic on float32 weights, and the norm of the gradients of their sum."""
    settings = Hardware(
        device="cpu", dtype="bfloat16", mixed_precision=True, processes=parallel.world, tensor_parallel=size
    )
    parallel = sharing(parallel, settings)
    sharded = load_sharded(folder, settings.to_train(), parallel, dtype=compute_dtype(settings))
    with sharing_tokens(parallel.sequence):
        logprobs = sharded(completion_logprobs, PROMPTS, COMPLETIONS, 1.0)
    (logprobs.sum() * float(parallel.data_rank == 0)).backward()
    assert {p.dtype for p in sharded.parameters()} == {torch.float32}
    return logprobs.detach().numpy(), clip_grad_norm(sharded.parameters(), 1e9)


def two_steps(
    parallel: Parallel, folder: str, state: str, rate: float, ways: dict[str, int]
) -> tuple[dict[str, Any], list[float]]:
    """Weights after two steps of AdamW, and the norms of the gradients. Each step starts from a checkpoint, the first
    from one only if there is any. The model is saved beside the checkpoints. `ways`: fields of Hardware."""
    settings = Hardware(device="cpu", processes=parallel.world, **ways)
    parallel = sharing(parallel, settings)
    norms = []
    for step in (1, 2):
        sharded = load_sharded(folder, settings, parallel)
        optimizer = make_optimizer([*sharded.parameters()], Optimizer(learning_rate=rate))
        found = checkpoint.load_latest(parallel, Path(state), {"model": sharded}, {"optimizer": optimizer})
        if found is not None and found[0] >= step:
            continue
        for number, rows in enumerate(([0, 1, 3, 6, 7], [2, 4, 5])):
            counts = float(number % parallel.data_world == parallel.data_rank)
            with sharing_tokens(parallel.sequence):
                logprobs = sharded(completion_logprobs, [PROMPTS[i] for i in rows], [COMPLETIONS[i] for i in rows], 1.0)
            (logprobs.sum() * counts).backward()
        norms.append(clip_grad_norm(sharded.parameters(), 1.0))
        optimizer.step()
        checkpoint.save(parallel, Path(state), step, {"model": sharded}, {"optimizer": optimizer}, {})
    sharded.save(Path(state) / "model")
    return {name: tensor.numpy() for name, tensor in sharded.full_tensors()}, norms


def refusal(
    parallel: Parallel, folder: str, size: int, hardware: dict[str, Any], kind: str = "sequence_parallel"
) -> str:
    """What is said of a model whose sequences cannot be shared, or whose layers cannot be divided."""
    settings = Hardware(device="cpu", processes=parallel.world, **{kind: size}, **hardware)
    try:
        load_sharded(folder, settings, sharing(parallel, settings))
    except InputError as error:
        return str(error)
    return "not refused"


def refusal_with_a_wrong_plan(parallel: Parallel, folder: str) -> str:
    """What is said of a model whose MLP does something that a plan for its division does not know of."""

    def scaled(self: Any, states: Any) -> Any:
        gate, up = self.gate_proj(states), self.up_proj(states)
        return self.down_proj(self.act_fn(gate) * up * gate.mean(-1, keepdim=True))

    own, LlamaMLP.forward = LlamaMLP.forward, scaled
    try:
        return refusal(parallel, folder, 2, {"fused": False}, "tensor_parallel")
    finally:
        LlamaMLP.forward = own
