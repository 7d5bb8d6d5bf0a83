"""The processes of a job: their ranks and their collectives.

`torchrun` starts several, on one machine or more. A job started without it is one process; then there is no process
group, and every call here returns immediately.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grpo.config.common import Hardware
from grpo.distributed.sequence_group import SequenceGroup
from grpo.errors import InputError
from grpo.processes import malloc

T = TypeVar("T")
U = TypeVar("U")

PATIENCE = timedelta(hours=1)
"""Timeout of collectives; longer than rollouts of uneven length, or saving a large model, take. If a process dies, the
wait ends immediately, so the timeout matters only for a process that hangs."""


@dataclass(frozen=True)
class Parallel:
    """Process `rank` of `world` processes; `local_rank` counts those on this machine."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
    sequence: SequenceGroup | None = None
    """The processes that share the tokens of their micro-batches; None: each process has its own."""

    @classmethod
    def start(cls, hardware: Hardware) -> Parallel:
        """Joins the process group that torchrun started. Each process gets its own GPU if the machine has GPUs. Raises
        InputError if the machine lacks the devices."""
        rank, local_rank = _number("RANK", 0), _number("LOCAL_RANK", 0)
        world = _number("WORLD_SIZE", 1)
        device = _device(hardware.device, local_rank, _number("LOCAL_WORLD_SIZE", world))
        if device.type == "cpu":
            malloc.keep_freed_memory()
        if world > 1:
            bound = device if device.type == "cuda" else None
            dist.init_process_group(_backend(device), timeout=PATIENCE, device_id=bound)
        return cls(rank, world, local_rank, device, sequence_group_of(rank, world, hardware))

    @classmethod
    def alone(cls, device: torch.device) -> Parallel:
        """This process by itself, even if its job has others."""
        return cls(0, 1, 0, device)

    @property
    def data_world(self) -> int:
        """Number of groups of processes with micro-batches of their own."""
        return self.world // (self.sequence.size if self.sequence else 1)

    @property
    def data_rank(self) -> int:
        """Number of this process's group among them."""
        return self.rank // (self.sequence.size if self.sequence else 1)

    @property
    def reports(self) -> bool:
        """Whether this process reports the numbers of its group."""
        return self.sequence is None or self.sequence.rank == 0

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def use_device(self) -> None:
        """Makes this process's GPU the current one of the calling thread. A new thread begins with the machine's first,
        whatever `start` set for the thread that called it."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def all_gather(self, value: T) -> list[T]:
        """Returns the values of all processes, by rank. Values must be picklable."""
        if self.world == 1:
            return [value]
        values: list[T] = [value] * self.world
        dist.all_gather_object(values, value)
        return values

    def any(self, value: bool) -> bool:
        """Whether it is true on any process."""
        return any(self.all_gather(value))

    def broadcast(self, value: T) -> T:
        """Returns the first process's value on all processes."""
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def reduce(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Reduces metrics over all processes: minimum or maximum for names that end in _min or _max, else the sum.

        Sums are added in the same order everywhere, so that all processes make the same decisions. A process may lack
        some metrics.
        """
        total: dict[str, float] = {}
        for measured in self.all_gather(dict(stats)):
            for name, value in measured.items():
                total[name] = _merge(name, total[name], value) if name in total else value
        return total

    def map_together(self, function: Callable[[T], U], items: Sequence[T], filler: T) -> list[U]:
        """`function` of each item. All processes must call it; they call `function` equally often, as calls of sharded
        models need, and those with fewer items with `filler`."""
        rounds = max(self.all_gather(len(items)))  # agreed on before the first call, which waits for the others
        results = [function(item) for item in items]
        for _ in range(rounds - len(items)):
            function(filler)
        return results

    def deal(self, items: Sequence[T]) -> Sequence[T]:
        """This process's items, which are dealt out in turn."""
        return items[self.rank :: self.world]

    def collect(self, own: Sequence[T]) -> list[T]:
        """One result for each item that was dealt out, in the order of the items, from each process's own."""
        hands = self.all_gather(own)
        return [hands[i % self.world][i // self.world] for i in range(sum(map(len, hands)))]

    def barrier(self) -> None:
        """Waits until all processes have called it."""
        if self.world > 1:
            dist.barrier()

    def mesh(self) -> DeviceMesh:
        """The one-dimensional device mesh of all processes. For a single process it creates a group of one."""
        if not dist.is_initialized():
            dist.init_process_group(_backend(self.device), store=dist.HashStore(), rank=0, world_size=1)
        return init_device_mesh(self.device.type, (self.world,))

    def mesh_of_groups(self) -> DeviceMesh:
        """The mesh of all processes by group ("copies" of the layers that a group divides) and within it ("layers")."""
        assert self.sequence is not None
        sizes = (self.data_world, self.sequence.size)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=("copies", "layers"))

    def close(self) -> None:
        """Closes the process group of a job that succeeded. A failed process must just exit, because the others would
        wait for it here."""
        if dist.is_initialized():
            dist.destroy_process_group()


def divide(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Divides items among `parts` so that their total costs are nearly equal. The most expensive remaining item goes to
    the cheapest part (longest processing time first; at most 4/3 of the optimum). Deterministic."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0.0, part) for part in range(parts)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, part = loads[0]
        shares[part].append(item)
        heapq.heapreplace(loads, (load + costs[item], part))
    return [sorted(share) for share in shares]


def is_peer_failure(error: BaseException) -> bool:
    """Whether an exception only means that another process of the job is gone. The cause is in that process's log.
    torchrun blames the process that ends first, so a process that lost a peer should wait to be stopped."""
    gone = r"Connection (closed|reset) by peer|remote process exited|Broken pipe|Connection refused"
    return isinstance(error, RuntimeError) and re.search(gone, str(error)) is not None


def _backend(device: torch.device) -> str:
    # Objects are always sent between CPUs, so that sending a rollout takes no GPU memory.
    backends = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
    if device.type not in backends:
        raise InputError(f"hardware.device {device.type!r} works in one process and in one type of number; use 'cpu'")
    return backends[device.type]


def _device(wanted: str, local_rank: int, local_world: int) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = wanted if wanted != "auto" else "cuda" if gpus else "cpu"
    if kind != "cuda":
        return torch.device(kind)
    if not gpus:
        raise InputError("hardware.device is 'cuda', but torch finds no GPU here; set it to 'auto' or 'cpu'")
    if local_world > gpus:
        raise InputError(
            f"{local_world} processes on a machine with {gpus} GPUs; start one process a GPU, or set hardware.device "
            "to 'cpu'"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else equal products may differ in their bits
    return device


def sequence_group_of(rank: int, world: int, hardware: Hardware) -> SequenceGroup | None:
    """Groups of neighbours, which mostly are on one machine."""
    name = "tensor_parallel" if hardware.tensor_parallel > 1 else "sequence_parallel"
    size: int = getattr(hardware, name)
    if size == 1:
        return None
    if world % size:
        raise InputError(f"hardware.{name} = {size} must divide the number of processes, {world}")
    groups = [dist.new_group([*range(first, first + size)], timeout=PATIENCE) for first in range(0, world, size)]
    return SequenceGroup(rank % size, size, groups[rank // size], name == "tensor_parallel")


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise InputError(f"{name} is {text!r} in the environment, where torchrun sets a number; unset it")
    return int(text)


def _merge(name: str, a: float, b: float) -> float:
    # Python's min and max are not enough: with NaN their result depends on the order.
    if name.endswith(("_min", "_max")) and a == a and b == b:
        return min(a, b) if name.endswith("_min") else max(a, b)
    return a + b
