"""As many threads as cores are free, again and again while a job runs.

Threads of one operation wait for each other by spinning. On a quiet machine that is fastest. Beside one busy process it
is a collapse: whichever thread has no core holds up all others, some thousand times a step. So a job gives cores up as
others take them, and takes them back.

The number of threads must not change a result. That holds in trainers that `grpo.processes.cpu_instructions` has set
up, and for what is computed by our kernels and by matrix products. It does not hold for some of torch's operations
(SiLU computes the last few elements of each thread by other instructions), so only fused models adapt.
"""

from __future__ import annotations

import torch

from grpo.processes.cpu_instructions import sums_ignore_threads
from grpo.processes.free_cores import FreeCores


class _Threads:
    """The largest number of threads, and which cores are free; None where the number must stay."""

    def __init__(self) -> None:
        self.most = torch.get_num_threads()
        self.cores = FreeCores() if self.most > 1 and sums_ignore_threads() else None


_threads: _Threads | None = None


def adapt_threads(device: torch.device) -> None:
    """On a CPU, gives the calling thread's operations as many threads as there are free cores. Takes a microsecond."""
    global _threads
    if device.type != "cpu":
        return
    if _threads is None:
        _threads = _Threads()
    if _threads.cores is not None:
        _set(min(_threads.most, _threads.cores.count()))


def use_all_threads(device: torch.device) -> None:
    """Gives the calling thread's operations as many threads as they had before any were given up."""
    if device.type == "cpu" and _threads is not None and _threads.cores is not None:
        _set(_threads.most)


def _set(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
