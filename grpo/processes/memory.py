"""Distinguishes out-of-memory errors of a process or machine from other failures: each library reports them
differently, and one not at all."""

from __future__ import annotations

import errno
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from grpo.errors import InputError
from grpo.processes.disk import causes

OUT_OF_MEMORY = (
    "memory ran out: end other programs, or allow more where a limit holds (ulimit -d and -v, a container's limit)"
)
LEAST_BYTES = 200_000_000
"""Below this limit on a process's data, NumPy's OpenBLAS ends the process while it is loaded, in words of its own."""
RUN_BYTES = 600_000_000
"""Below this limit a run fails at a place that depends on the limit, also in libraries that end the process in words of
their own. At 450 MB it failed, at 550 MB a small one did not."""
LOADING_S = 60.0
"""Processor seconds after which a process that loads libraries is ended; it takes about five."""
CANNOT_LOAD = signal.SIGPROF
"""The signal that ends it."""
_WORDS = ("Cannot allocate memory", "failed to map segment from shared object", "std::bad_alloc")


def says_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one of its causes, means that a process could not get more memory."""
    return any(
        isinstance(cause, MemoryError)
        or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)
        or any(words in str(cause) for words in _WORDS)
        for cause in causes(error)
    )


def check_limit(needed: int = LEAST_BYTES) -> None:
    """Raises InputError if a limit (`ulimit -d`) leaves this process less than `needed` bytes."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise InputError(
            f"{OUT_OF_MEMORY}; this process may hold {allowed / 1e6:.0f} MB and needs {needed / 1e6:.0f} MB"
        )


@contextmanager
def limited_loading() -> Iterator[None]:
    """Ends this process by CANNOT_LOAD if the block takes more than LOADING_S of its processor time. OpenBLAS, which
    SciPy loads, asks for its buffers for ever where a limit on memory refuses them, and lets no Python code run."""
    signal.setitimer(signal.ITIMER_PROF, LOADING_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
