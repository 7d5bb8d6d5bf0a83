"""Decoding steps recorded as CUDA graphs: the GPU does not wait for Python to launch kernels."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from grpo.model.rope import rope_limit

logger = logging.getLogger(__name__)

RECORDS = {"cuda"}
"""Types of devices whose steps are recorded."""
_FAILED = "r1flow_not_recordable"
"""Attribute of a model whose steps could not be recorded."""


def can_record(backbone: Any, device: torch.device) -> bool:
    """Whether steps of a model may be recorded. A sharded model gathers its weights in Python, routers whose choices
    are replayed later hand them to Python, and rotary embeddings that depend on the length ask for it there."""
    if device.type not in RECORDS or getattr(backbone, "replayed_routers", None) or hasattr(backbone, _FAILED):
        return False
    return rope_limit(backbone) is None and not any(isinstance(module, FSDPModule) for module in backbone.modules())


class GraphMemory:
    """The memory that the graphs of a decoder allocate, one after the other. Of graphs with memory of their own, what
    they leave would stay unused until the device is full."""

    def __init__(self) -> None:
        self._pool: Any = None

    @property
    def id(self) -> Any:
        """Of torch's pool, which is made when it is first asked for, on the current GPU."""
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        return self._pool.id


def record(
    run: Callable[[], Tensor], device: torch.device, memory: GraphMemory, backbone: Any
) -> Callable[[], Tensor] | None:
    """Records the kernels that `run` launches on `device`, without executing them. Returns a function that executes
    them on the same memory and returns the same tensor with new values; None if they cannot be recorded, which is
    noted on the `backbone` unless memory ran out.

    All tensors that `run` reads must stay where they are. `run` must have run once before, so that libraries have
    allocated what they need.
    """
    # A stream of another GPU, which is current in a new thread, would record nothing.
    with torch.cuda.device(device):
        try:
            try:
                return _recorded(run, device, memory)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # during a recording the allocator itself does not return what is unused
                return _recorded(run, device, memory)
        except RuntimeError as error:  # such as: the host needs a value to continue
            if not isinstance(error, torch.OutOfMemoryError):
                setattr(backbone, _FAILED, True)
            reason = str(error).split("\n")[0]
            logger.warning("decoding steps are not recorded as CUDA graphs, and are slower: %s", reason)
            return None


def _recorded(run: Callable[[], Tensor], device: torch.device, memory: GraphMemory) -> Callable[[], Tensor]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # Not `torch.cuda.graph`, which returns all unused memory to the driver each time.
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=memory.id, capture_error_mode="thread_local")  # other threads may train meanwhile
        try:
            result = run()
        finally:
            try:
                graph.capture_end()
            except RuntimeError:
                _stop_allocating(device, memory)
                raise
    torch.cuda.current_stream().wait_stream(stream)

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _stop_allocating(device: torch.device, memory: GraphMemory) -> None:
    """After a recording that failed: torch's allocator would take it for unfinished, and never again free what is
    unused to make room."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):  # it had stopped
        torch._C._cuda_endAllocateToPool(index, memory.id)
        torch._C._cuda_releasePool(index, memory.id)
