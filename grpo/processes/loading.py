"""Loading of large libraries such as torch: bounded in time, and left alone by the garbage collector."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager

LOADING_S = 60.0
"""Processor seconds after which a process that loads libraries is ended; it takes about five."""
CANNOT_LOAD = signal.SIGPROF
"""The signal that ends it."""


@contextmanager
def limited_loading() -> Iterator[None]:
    """Ends this process by CANNOT_LOAD if the block takes more than LOADING_S of its processor time. OpenBLAS, which
    SciPy loads, asks for its buffers for ever where a limit on memory refuses them, and lets no Python code run."""
    signal.setitimer(signal.ITIMER_PROF, LOADING_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def never_collected() -> Iterator[None]:
    """Keeps the garbage collector from what the block makes, meanwhile, later and at exit. For libraries that are
    loaded once: looking at half a million objects of torch and transformers took a third of the time of a trainer with
    little to do. Forks share the memory that it does not touch."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
