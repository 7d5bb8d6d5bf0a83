"""Checkpoints from which a killed job resumes. They are written to a temporary folder and renamed, so that a partial
one is never read.

A checkpoint is a folder with tensors (each process writes its shards), plain data of the first process, and hashes of
both. Any number of processes can read it. The two newest are kept. If the newest does not match its hashes, the
previous one is read.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo.distributed import checksums, tensor_io
from grpo.distributed.process_group import Parallel
from grpo.distributed.tensor_io import Modules, Optimizers
from grpo.errors import InputError
from grpo.processes.notices import is_heard, notice

_PREFIX = "step-"
_DAMAGED = "damaged-"
_TENSORS, _PLAIN = "tensors", "plain.pt"


def save(
    parallel: Parallel, state: Path, step: int, modules: Modules, optimizers: Optimizers, plain: dict[str, Any]
) -> None:
    """Saves the tensors of `modules` and `optimizers` and the first process's `plain` data for `step`. The previous
    checkpoint is kept, in case this one turns out to be damaged. All processes must call it; the checkpoint is visible
    to all of them when it returns."""
    final = state / f"{_PREFIX}{step:08d}"
    if parallel.is_main:  # first, so that the disk never holds more than two
        for older in [path for path in _saved(state) if path != final][:-1]:
            shutil.rmtree(older)
    _publish(parallel, final, modules, optimizers, plain)
    if parallel.is_main:
        for damaged in state.glob(f"{_DAMAGED}{_PREFIX}*"):
            shutil.rmtree(damaged)
    parallel.barrier()


def save_weights(parallel: Parallel, folder: Path, modules: Modules) -> None:
    """Saves only the tensors of `modules`, replacing the contents of `folder`. All processes must call it."""
    _publish(parallel, folder, modules, {}, {})
    parallel.barrier()


def load_weights(parallel: Parallel, folder: Path, modules: Modules) -> None:
    """The inverse of `save_weights`, in place. All processes must call it. Raises InputError if the files are
    damaged."""
    if problem := _problem(parallel, folder):
        raise InputError(f"{folder}: {problem}; run the same command again: it goes on from before these weights")
    tensor_io.read(folder / _TENSORS, modules, {})


def load_latest(
    parallel: Parallel,
    state: Path,
    modules: Modules,
    optimizers: Optimizers,
    refers_to: Callable[[dict[str, Any]], Iterable[Path]] | None = None,
) -> tuple[int, dict[str, Any]] | None:
    """Loads the newest readable checkpoint's tensors into `modules` and `optimizers`. Returns (step, plain data), or
    None. All processes must call it.

    A damaged checkpoint is set aside with a notice, as is one whose plain data refers to damaged weights: `refers_to`
    returns the folders of `save_weights` that the plain data needs.
    """
    for folder in parallel.broadcast(_saved(state)[::-1]):
        plain: dict[str, Any] = {}
        if not (problem := _problem(parallel, folder)):
            plain = torch.load(folder / _PLAIN, weights_only=True)
            for weights in refers_to(plain) if refers_to else ():
                problem = problem or _problem(parallel, weights)
        if not problem:
            tensor_io.read(folder / _TENSORS, modules, optimizers)
            return int(folder.name.removeprefix(_PREFIX)), plain
        if is_heard():
            notice(f"{folder}: unreadable ({problem}); going back to what was before it")
        if parallel.is_main:
            aside = folder.with_name(_DAMAGED + folder.name)
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        parallel.barrier()
    return None


def rng_state() -> dict[str, Any]:
    """States of the global random generators of Python, NumPy and torch."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,  # of this process
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """The inverse of `rng_state`."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _publish(parallel: Parallel, final: Path, modules: Modules, optimizers: Optimizers, plain: dict[str, Any]) -> None:
    """Writes a checkpoint to a temporary folder and renames it."""
    state, writing = final.parent, final.parent / "writing"
    if parallel.is_main:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    parallel.barrier()
    if not writing.is_dir():
        raise InputError(f"{state}: not shared with the first process's machine; keep it on a shared file system")
    tensor_io.write(writing / _TENSORS, modules, optimizers)
    if parallel.is_main:
        with (writing / _PLAIN).open("wb") as file:
            torch.save(plain, file)
            file.flush()
            os.fsync(file.fileno())
    parallel.barrier()
    checksums.write(parallel, writing)
    if parallel.is_main:
        _sync(writing / _TENSORS, writing)
        shutil.rmtree(final, ignore_errors=True)
        writing.rename(final)
        _sync(state)


def _saved(state: Path) -> list[Path]:
    return sorted(path for path in state.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal())


def _problem(parallel: Parallel, folder: Path) -> str | None:
    """Why a checkpoint cannot be read; the same on all processes. Nothing is loaded before it is known to be complete,
    because a half-loaded model could not be restored."""
    if checksums.is_written(folder):
        return checksums.damage(parallel, folder)
    problem = None
    try:  # written by a version without hashes
        torch.load(folder / _PLAIN, weights_only=True)
        tensor_io.check(folder / _TENSORS)
    except Exception as error:  # torch raises many kinds for files that it cannot parse
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    return next(filter(None, parallel.all_gather(problem)), None)


def _sync(*folders: Path) -> None:
    """A new file's name is durable only once its folder has been synced."""
    for folder in folders:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
