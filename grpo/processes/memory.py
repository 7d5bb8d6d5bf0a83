"""Distinguishes out-of-memory errors of a process or machine from other failures: each library reports them
differently."""

from __future__ import annotations

import errno

from grpo.processes.disk import causes

OUT_OF_MEMORY = (
    "memory ran out: end other programs, or allow more where a limit holds (ulimit -d and -v, a container's limit)"
)
_WORDS = ("Cannot allocate memory", "failed to map segment from shared object", "std::bad_alloc")


def says_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one of its causes, means that a process could not get more memory."""
    return any(
        isinstance(cause, MemoryError)
        or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)
        or any(words in str(cause) for words in _WORDS)
        for cause in causes(error)
    )
