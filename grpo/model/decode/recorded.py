"""Decoding steps recorded as CUDA graphs: the GPU does not wait for Python to launch kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

logger = logging.getLogger(__name__)

RECORDS = {"cuda"}
"""Types of devices whose steps are recorded."""


def can_record(backbone: Any, device: torch.device) -> bool:
    """Whether steps of a model may be recorded. A sharded model gathers its weights in Python, and routers whose
    choices are replayed later hand them to Python."""
    if device.type not in RECORDS or getattr(backbone, "replayed_routers", None):
        return False
    return not any(isinstance(module, FSDPModule) for module in backbone.modules())


def record(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor] | None:
    """Records the kernels that `run` launches on `device`, without executing them. Returns a function that executes
    them on the same memory and returns the same tensor with new values; None if they cannot be recorded.

    All tensors that `run` reads must stay where they are. `run` must have run once before, so that libraries have
    allocated what they need.
    """
    # A stream of another GPU, which is current in a new thread, would record nothing.
    with torch.cuda.device(device):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            # Not `torch.cuda.graph`, which returns all unused memory to the driver each time.
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")  # other threads may train meanwhile
                try:
                    result = run()
                finally:
                    graph.capture_end()
        except RuntimeError as error:  # such as: the host needs a value to continue
            reason = str(error).split("\n")[0]
            logger.warning("decoding steps are not recorded as CUDA graphs, and are slower: %s", reason)
            return None
        torch.cuda.current_stream().wait_stream(stream)

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay
