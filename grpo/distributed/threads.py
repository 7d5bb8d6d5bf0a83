"""Adapts a running job's number of threads to the number of free cores.

Threads of one operation wait for each other by spinning. On an idle machine that is fastest. If another process is
busy, speed collapses: the thread that has no core holds up all others, about a thousand times per step. So a job gives
up cores when others use them, and takes them back later.

In float32 the number of threads must not change a result. This holds in trainers set up by
`grpo.processes.cpu_instructions`, for our kernels and for matrix products. It does not hold for some torch operations
(SiLU computes the last few elements of each thread with other instructions), so only fused models adapt. In bfloat16,
where nothing is promised across machines, they adapt in any process.
"""

from __future__ import annotations

import torch

from grpo.processes.cpu_instructions import sums_ignore_threads
from grpo.processes.free_cores import FreeCores


class _Threads:
    """The maximum number of threads, and a counter of free cores; None if there is no other number."""

    def __init__(self) -> None:
        self.most = torch.get_num_threads()
        self.cores = FreeCores() if self.most > 1 else None
        self.adapt_float32 = sums_ignore_threads()
        self.adapted = False  # whether the number has been this module's to set


_threads: _Threads | None = None


def adapt_threads(device: torch.device, dtype: torch.dtype) -> None:
    """On a CPU, gives the calling thread's operations on tensors of this type as many threads as there are free cores.
    Takes a microsecond."""
    global _threads
    if device.type != "cpu":
        return
    if _threads is None:
        _threads = _Threads()
    if _threads.cores is not None and (_threads.adapt_float32 or dtype == torch.bfloat16):
        _threads.adapted = True
        _set(min(_threads.most, _threads.cores.count()))


def use_all_threads(device: torch.device) -> None:
    """Restores the maximum number of threads for the calling thread's operations."""
    if device.type == "cpu" and _threads is not None and _threads.adapted:
        _set(_threads.most)


def _set(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
