"""What the processes of tests/grpo/distributed/test_sharded_loading.py do: load models by shards, and measure with
them."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo.config.common import Hardware, Lora
from grpo.config.experts import Experts
from grpo.distributed.fsdp import Sharded, local, shard
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError
from grpo.model.loading import REWARD_MODEL, load_policy
from grpo.model.logprobs import completion_logprobs
from grpo.model.routers import marked_routers
from grpo.model.sharded.loading import load_sharded, load_to_copy
from grpo.model.value_head import own_value
from grpo.rl.per_token_values import measure
from grpo.scoring.reward_model import RewardModelScorer
from grpo.scoring.step_model import StepScorer

CPU = Hardware(device="cpu")


class PeakMemory:
    """The most memory of its own that this process holds within the context, beyond what it held before, in bytes.
    Pages of files, which the system can drop, do not count."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self.before, self.bytes, self._over = _own_memory(), 0, threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.bytes = max(self.bytes, _own_memory() - self.before)


def _own_memory() -> int:
    held = psutil.Process(os.getpid()).memory_info()
    return int(held.rss - held.shared)


WAYS: dict[str, dict[str, Any]] = {
    "shards": {},
    "adapters": {"lora": Lora(rank=2, alpha=4)},
    "reward model": {"kind": REWARD_MODEL},
    "value model": {"part": own_value},
}
"""Ways to load by shards."""
ASKED_TOKENS = [[5, 6, 7], [8, 9, 10, 11]], [[12, 13, 14], [15, 16]]
"""Prompts and completions."""
ASKED = [[{"role": "user", "content": f"What is {i} + 1?"}] for i in range(8)]
ANSWERS = [f"It is {i + 1}." for i in range(8)]
CHAINS = [f"<think>\nadd {i}\ncheck\n</think>\n<answer>{i + 1}</answer>" for i in range(8)]


def cost_of_loading(parallel: Parallel, small: str, folder: str, way: str = "shards") -> dict[str, float]:
    """Bytes at the peak of loading `folder` in one of `WAYS`, or "whole" first, and seconds. `small` was loaded before,
    which imports and compiles what it takes."""

    def load(model: str) -> Sharded:
        if way == "whole":
            return shard(load_policy(model, CPU), parallel)
        return load_sharded(model, CPU, parallel, **WAYS[way])

    load(small)
    began = time.monotonic()
    with PeakMemory() as peak:
        kept = load(folder)
    del kept
    return {"bytes": peak.bytes, "seconds": time.monotonic() - began}


def cost_of_copying(parallel: Parallel, small: str, folder: str, out: str) -> dict[str, float]:
    """The same for copying `folder`, alone, to `out`."""

    def copy(model: str) -> None:
        load_to_copy(model, CPU).save_pretrained(out)

    copy(small)
    began = time.monotonic()
    with PeakMemory() as peak:
        copy(folder)
    return {"bytes": peak.bytes, "seconds": time.monotonic() - began}


def loaded(
    parallel: Parallel, folder: str, experts: Experts | None = None, way: str = "shards", seed: int = 0
) -> dict[str, Any]:
    """The weights of a model that was loaded in one of `WAYS`, new ones drawn from the seed, the share of them in this
    process, and for each of its routers whether it is frozen and among how many experts it chooses."""
    torch.manual_seed(seed)
    sharded = load_sharded(folder, CPU, parallel, experts=experts, **WAYS[way])
    weights = dict(sharded.full_tensors())
    whole = sum(weight.numel() for weight in weights.values())
    mine = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in sharded.model.parameters())
    routers = [] if way == "value model" else marked_routers(sharded.model)
    return {
        "weights": {name: weight.detach().numpy() for name, weight in weights.items()},
        "share": mine / whole,
        "frozen": [not any(p.requires_grad for p in router.parameters()) for router in routers],
        "experts": [router.expert_count for router in routers],
    }


def saved_again(parallel: Parallel, folder: str, out: str, hardware: Hardware = CPU) -> dict[str, float]:
    """Loads a model by shards and saves it. Sums of the tensors that its files would hold, by name."""
    sharded = load_sharded(folder, hardware, parallel)
    sharded.save(Path(out))
    return {name: tensor.double().sum().item() for name, tensor in sharded.file_tensors()}


def adapted(parallel: Parallel, folder: str, out: str, experts: Experts | None = None) -> dict[str, Any]:
    """Adapters with random weights learn one step and are saved. Log-probabilities with them, and the norms of their
    gradients by name."""
    sharded = load_sharded(folder, CPU, parallel, lora=Lora(rank=2, alpha=4), experts=experts)
    learn = {name: p for name, p in sharded.model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in sharded.model.named_parameters():
            drawn = 0.3 * torch.randn(parameter.shape, generator=generator)
            if ".lora_" in name:
                local(parameter).copy_(drawn.chunk(parallel.world)[parallel.rank])
    sharded(completion_logprobs, *ASKED_TOKENS, 1.0).sum().div(parallel.world).backward()
    norms = {name: _whole(p.grad).norm().item() for name, p in learn.items() if p.grad is not None}
    with torch.no_grad():
        for p in learn.values():
            if p.grad is not None:
                p.sub_(0.01 * p.grad)
        rows = sharded(completion_logprobs, *ASKED_TOKENS, 1.0)
    sharded.save(Path(out))
    return {"rows": rows.numpy(), "norms": norms}


def refusal(parallel: Parallel, folder: str) -> str:
    """Why a model cannot be sharded."""
    try:
        load_sharded(folder, CPU, parallel)
    except InputError as error:
        return str(error)
    raise AssertionError("it was sharded")


def measured(parallel: Parallel, folder: str, count: int) -> dict[str, Any]:
    """Log-probabilities of `count` completions, of which the first process has all but one, in micro-batches of one.
    And the most weights that were whole at once, all of them, and those of the largest part and of the rest."""
    sharded = load_sharded(folder, CPU, parallel, trained=False)
    prompts = [[5 + i, 6, 7] for i in range(count)]
    completions = [[8, 9 + i] for i in range(count)]
    mine, gathered = _share(parallel, count), Gathered(sharded)
    rows = measure(
        lambda p, c: sharded(completion_logprobs, p, c, 1.0),
        [prompts[i] for i in mine],
        [completions[i] for i in mine],
        1,
        parallel,
    )
    return {"rows": torch.stack(rows).numpy() if rows else None, **gathered.found()}


def scored(parallel: Parallel | None, folder: str, count: int) -> dict[str, Any]:
    """What `measured` tells, of a reward model that scores `count` responses, one at a time."""
    scorer = RewardModelScorer(folder, CPU, 1, parallel=parallel)
    mine, gathered = _share(parallel, count), Gathered(scorer.members[0])
    rows = scorer([ASKED[i] for i in mine], [ANSWERS[i] for i in mine])
    return {"rows": rows, **gathered.found()}


def steps_scored(parallel: Parallel | None, folder: str, count: int) -> dict[str, Any]:
    """The same of a process reward model, on as many chains of reasoning."""
    scorer = StepScorer(folder, CPU, parallel=parallel)
    mine, gathered = _share(parallel, count), Gathered(scorer.model)
    chains = scorer([(ASKED[i], [CHAINS[i]]) for i in mine])
    return {"rows": [score for (steps,) in chains for _, score in steps], **gathered.found()}


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _share(parallel: Parallel | None, count: int) -> range:
    """All but one for the first process, one for the second, none for the others; all for one alone."""
    if parallel is None:
        return range(count)
    return range(count - 1) if parallel.rank == 0 else range(count - 1, count) if parallel.rank == 1 else range(0)


class Gathered:
    """Watches how many weights of a sharded model are whole at once."""

    def __init__(self, sharded: Sharded):
        self.model, self.held = sharded.model, [0]
        self.parts = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        self.sizes = [sum(parameter.numel() for parameter in part.parameters()) for part in self.parts]
        for part in self.parts:  # after the hook that gathers it
            part.register_forward_pre_hook(lambda *_: self.held.append(self._whole()))

    def _whole(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if not isinstance(p, DTensor))

    def found(self) -> dict[str, Any]:
        """Calls of the model; the most weights that were whole at once, and those of the largest part and of what is in
        no part; names of those that stayed whole."""
        return {
            "calls": len(self.held) // max(1, len(self.parts)),
            "most": max(self.held),
            "part": max(self.sizes, default=0),
            "rest": sum(parameter.numel() for parameter in self.model.parameters()) - sum(self.sizes),
            "left": [name for name, p in self.model.named_parameters() if not isinstance(p, DTensor)],
        }


def alone(folder: Path, count: int) -> Any:
    """The log-probabilities of `measured`, by the whole model in this process."""
    policy = load_policy(str(folder), CPU)
    with torch.no_grad():
        rows = [completion_logprobs(policy, [[5 + i, 6, 7]], [[8, 9 + i]], 1.0)[0] for i in range(count)]
    return torch.stack(rows).numpy()
