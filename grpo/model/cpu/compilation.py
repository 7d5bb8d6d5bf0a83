"""Numba functions that give the same bits in every process, because each loads them from Numba's disk cache.

Numba optimizes a parallel function's body once for the process that compiles it and once more for the copy on disk. The
second pass may vectorize a sum in another order, so a first run would differ from a second in the last bit. A function
that is not on disk yet is therefore compiled by a separate process (`python -m grpo.model.cpu.compilation`) and then
loaded. If Numba finds no writable folder, every process compiles for itself, which also gives the same bits each time.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core import event

REASSOCIATE = frozenset({"reassoc", "contract", "arcp", "nsz"})
"""Fast-math flags: sums may add several numbers at a time; NaN and infinity keep their meaning."""

_lock = threading.Lock()
"""Numba's own threading layer (used without OpenMP) crashes a process if two threads call it at once."""
_threads = threading.local()
_SOURCES = tuple(
    (file.name, file.stat().st_mtime, file.stat().st_size) for file in sorted(Path(__file__).parent.glob("*.py"))
)
"""What the loops and their helpers are compiled from."""
_on_disk: set[Any] = set()
"""Dispatchers for which this process runs only versions loaded from disk."""


def compiled(function: Any, **options: Any) -> Any:
    """`numba.njit` with a disk cache if there is a writable folder for it."""
    try:
        dispatcher = njit(cache=True, error_model="numpy", **options)(function)
    except RuntimeError:  # neither beside the file nor in the user's cache folder
        return njit(error_model="numpy", **options)(function)
    # Numba compiles anew if the function's own file has changed. Helpers compiled into it may be in another one.
    dispatcher._cache._cache_file._source_stamp = _SOURCES
    return dispatcher


inlined = partial(compiled, fastmath=set(REASSOCIATE))
exact = partial(compiled, fastmath={"contract"})


def parallel_over_rows(function: Any) -> Callable[..., None]:
    """Compiles `function`, whose outermost loop is a `prange`. It runs on as many threads as torch uses."""
    dispatcher = compiled(function, parallel=True, fastmath=set(REASSOCIATE))
    if dispatcher.stats.cache_path:
        _on_disk.add(dispatcher)

    def loop(*arguments: Any) -> None:
        with _lock:
            _use_as_many_threads_as_torch()
            try:
                dispatcher(*arguments)
            except _NotOnDisk as missing:
                _compile_in_a_process(function, missing.signature)
                dispatcher(*arguments)

    loop.dispatcher = dispatcher  # type: ignore[attr-defined]
    return loop


class _NotOnDisk(Exception):
    def __init__(self, signature: tuple[Any, ...]) -> None:
        super().__init__(f"not on disk for {signature}")
        self.signature = signature


class _RefuseToCompile(event.Listener):
    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"] in _on_disk:
            raise _NotOnDisk(event.data["args"])

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", _RefuseToCompile())


def _compile_in_a_process(function: Any, signature: tuple[Any, ...]) -> None:
    request = pickle.dumps((function.__module__, function.__name__, signature))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-m", __name__], input=request, capture_output=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"compiling {function.__name__} failed: {done.stderr.decode(errors='replace')}")


def _use_as_many_threads_as_torch() -> None:
    """Called in each thread that runs a loop, not earlier: a process that has started Numba's threads cannot fork
    (`grpo.fork_server`)."""
    import torch  # imported here because the process that only compiles does not need it

    count = torch.get_num_threads()
    if getattr(_threads, "count", None) != count:
        most: Any = numba.config
        numba.set_num_threads(min(count, most.NUMBA_NUM_THREADS))
        # torch and Numba share OpenMP, and Numba starts as many threads as there are cores
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        _threads.count = count


if __name__ == "__main__":
    module, name, signature = pickle.loads(sys.stdin.buffer.read())
    importlib.import_module(module)
    from grpo.model.cpu import compilation  # the module that the loops use; this one runs as __main__

    compilation._on_disk.clear()
    getattr(sys.modules[module], name).dispatcher.compile(signature)
