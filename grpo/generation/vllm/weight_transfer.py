"""Weight transfer from a trainer to the sampling processes, without using the disk.

Both ends import this file, which needs only torch. Tensors are broadcast over a separate process group (gloo between
CPUs, NCCL between GPUs), so the groups of trainer and engine are not involved.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Backend = Literal["gloo", "nccl"]
Named = tuple[str, Tensor]
UNKNOWN = -1
"""Version of weights that did not come from a trainer's complete update: those of the engine's own folder, or a partial
update."""
BACKEND = "r1flow"
"""Name of this transfer method in vLLM."""
SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""Configuration fields that must agree between the two models."""
BUCKET_BYTES = 256 * 2**20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = 2**62 - 1
_SUMMED = 2**24
"""Weights of a checksum that are summed at once."""


@dataclass
class Fingerprint:
    """Number of tensors, and a checksum of their names and bits. The checksum is an integer sum, so that it does not
    depend on device or order."""

    tensors: int = 0
    checksum: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        bits = tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])
        # In parts: on a GPU, torch first copies what it sums to int64.
        total = torch.stack([part.sum(dtype=torch.int64) for part in bits.split(_SUMMED)]).sum()
        self.tensors += 1
        self.checksum = (self.checksum + zlib.crc32(name.encode()) * int(total)) & _MASK


def buckets(weights: Iterable[Named], max_bytes: int = BUCKET_BYTES) -> Iterator[list[Named]]:
    """Consecutive tensors in buckets of at most `max_bytes` (at least one tensor each)."""
    bucket: list[Named] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def layout(bucket: Iterable[Named]) -> list[list[Any]]:
    """Name, type and shape of each tensor, as JSON-serializable lists."""
    return [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in bucket]


class Sender:
    """The trainer's end: rank 0 of the group."""

    def __init__(self, address: str, receivers: int, backend: Backend, timeout_s: float):
        """`address`: where the receivers reach this machine."""
        self.address, self.backend, self.size, self.timeout_s = address, backend, receivers + 1, timeout_s
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=_seconds(timeout_s))
        self._group: Any = None
        self._device = _device(backend)

    def rendezvous(self) -> dict[str, Any]:
        """The rendezvous data for receivers. `connect` waits for all receivers."""
        return {
            "address": self.address,
            "port": self._store.port,
            "size": self.size,
            "backend": self.backend,
            "timeout_s": self.timeout_s,
        }

    def connect(self) -> None:
        self._group = _group(self._store, 0, self.size, self.backend, self.timeout_s)

    def send(self, bucket: Iterable[Named], check: Callable[[], None]) -> None:
        """Broadcasts the tensors in order. `check` raises if the receivers have given up. Raises RuntimeError if a
        receiver is gone or receives nothing for `timeout_s`."""
        for _, tensor in bucket:
            work = self._group.broadcast(_bytes(tensor.to(self._device)), 0)
            while not work.is_completed():
                check()
                time.sleep(0.0002)
            work.wait()


class Receiver:
    """The engine's end: a rank above 0. Discard it after a failure, so that the sender notices."""

    def __init__(self, rank: int, address: str, port: int, size: int, backend: Backend, timeout_s: float):
        store = dist.TCPStore(address, port, is_master=False, timeout=_seconds(timeout_s))
        self._store, self._group = store, _group(store, rank, size, backend, timeout_s)
        self._device = _device(backend)

    def receive(self, expected: Iterable[tuple[str, str, list[int]]]) -> Iterator[Named]:
        """Yields the tensors one after another, as announced by `layout`."""
        for name, dtype, shape in expected:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            self._group.broadcast(_bytes(tensor), 0).wait()
            yield name, tensor


def _group(store: Any, rank: int, size: int, backend: Backend, timeout_s: float) -> Any:
    make = {"gloo": dist.ProcessGroupGloo, "nccl": getattr(dist, "ProcessGroupNCCL", None)}[backend]
    if make is None:
        raise RuntimeError("this build of torch has no NCCL; set transfer to 'gloo'")
    return make(dist.PrefixStore("weights", store), rank, size, _seconds(timeout_s))


def _device(backend: Backend) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=value)
