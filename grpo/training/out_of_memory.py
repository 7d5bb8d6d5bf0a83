"""The error message when a device runs out of memory: what it held, and which settings reduce that."""

from __future__ import annotations

import gc
import re
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from grpo.model.decode.cache import KeyValues

REMEDIES = {
    "weights": "set hardware.dtype = 'bfloat16' or raise hardware.processes, which divide them",
    "gradients": "train with lora, in SFT and RL, or raise hardware.processes, which divide them",
    "optimizer state": "raise hardware.processes, which divide it, or, without hardware.tensor_parallel, set "
    "optimizer.kind = 'adamw_8bit'",
    "key-value caches": "lower sampling.batch_size",
    "activations and logits": "lower micro_batch_tokens or set hardware.gradient_checkpointing = true",
    "unused by fragments": "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
}
"""Name of each part of the memory -> settings that reduce it."""
GB = 1e9
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|[KMG]iB)"
_WHEN_FULL = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch.*?and {_SIZE} is reserved by")


def held_bytes(device: torch.device) -> dict[str, int]:
    """Bytes of all tensors on a device that Python holds, by what they are."""
    seen: set[int] = set()
    held = dict.fromkeys(("weights", "gradients", "optimizer state", "key-value caches"), 0)

    def add(name: str, tensors: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type == device.type and not tensor.is_meta:
                storage = _local(tensor).untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    held[name] += storage.nbytes()

    objects = gc.get_objects()  # check their types only: some objects warn when accessed
    for thing in objects:
        if issubclass(type(thing), Tensor) and isinstance(thing, Parameter):
            add("weights", [thing])
            add("gradients", [thing.grad])
    for thing in objects:
        if issubclass(type(thing), torch.optim.Optimizer):
            for state in thing.state.values():
                add("optimizer state", state.values())
        elif issubclass(type(thing), KeyValues):
            add("key-value caches", thing.tensors())
    return held


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor."""
    part = getattr(tensor, "_local_tensor", tensor)
    return part if isinstance(part, Tensor) else tensor


def in_use(error: str, statistics: dict[str, int]) -> tuple[int, int]:
    """Bytes that tensors held, and bytes that torch reserved beside them, when the memory became full.

    torch's message has both. `statistics` are read later, when some tensors may be gone already. Their peaks are no
    substitute: they may be those of an earlier phase of the process, an update before this sampling, say.
    """
    if found := _WHEN_FULL.search(error):
        allocated, unit, unused, unused_unit = found.groups()
        return int(float(allocated) * UNITS[unit]), int(float(unused) * UNITS[unused_unit])
    allocated_now = statistics.get("allocated_bytes.all.current", 0)
    return allocated_now, max(0, statistics.get("reserved_bytes.all.current", 0) - allocated_now)


def explain(error: str, device: torch.device, statistics: dict[str, int]) -> str:
    """One line: what held how much memory, largest first, and which settings reduce the largest two.

    `error`: torch's own message. `statistics`: `torch.cuda.memory_stats`; empty if not available.
    """
    held = held_bytes(device)
    allocated, unused = in_use(error, statistics)
    held["activations and logits"] = max(0, allocated - sum(held.values()))
    held["unused by fragments"] = unused
    largest = sorted(((size, name) for name, size in held.items() if size), reverse=True)
    parts = ", ".join(f"{name} {size / GB:.2f} GB" for size, name in largest) or "nothing of this trainer's"
    remedies = [f"For less of {name}: {REMEDIES[name]}" for _, name in largest[:2]]
    tried = error.split(". ")[0].split("\n")[0]
    return ". ".join([f"the device's memory is full ({tried})", f"It held: {parts}", *remedies])


def out_of_memory(error: str) -> str:
    """`explain` for the device of this process."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    return explain(error, device, torch.cuda.memory_stats() if cuda else {})
