"""Checkpoints from which a killed job continues: written to one side, then renamed, so that a partial one is never
read.

A checkpoint is a folder with tensors, of which each process writes its shards, and plain data of the first process. Any
number of processes can read it.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo.distributed import tensor_io
from grpo.distributed.process_group import Parallel
from grpo.distributed.tensor_io import Modules, Optimizers
from grpo.errors import InputError

_PREFIX = "step-"
_TENSORS, _PLAIN = "tensors", "plain.pt"


def save(
    parallel: Parallel, state: Path, step: int, modules: Modules, optimizers: Optimizers, plain: dict[str, Any]
) -> None:
    """Saves the tensors of `modules` and `optimizers` and the first process's `plain` data for `step`; deletes older
    checkpoints once it is on disk. All processes call it, and see the checkpoint when it returns."""
    final = state / f"{_PREFIX}{step:08d}"
    _publish(parallel, final, modules, optimizers, plain)
    if parallel.is_main:
        for older in _saved(state):
            if older != final:
                shutil.rmtree(older)
    parallel.barrier()


def save_weights(parallel: Parallel, folder: Path, modules: Modules) -> None:
    """Saves the tensors of `modules` alone, in place of what `folder` holds. All processes call it."""
    _publish(parallel, folder, modules, {}, {})
    parallel.barrier()


def load_weights(folder: Path, modules: Modules) -> None:
    """The inverse of `save_weights`, in place. All processes call it."""
    tensor_io.read(folder / _TENSORS, modules, {})


def load_latest(
    parallel: Parallel, state: Path, modules: Modules, optimizers: Optimizers
) -> tuple[int, dict[str, Any]] | None:
    """Loads the newest checkpoint's tensors into `modules` and `optimizers`. Returns (step, plain data), or None."""
    newest = parallel.broadcast(_saved(state)[-1:])
    if not newest:
        return None
    tensor_io.read(newest[0] / _TENSORS, modules, optimizers)
    plain = torch.load(newest[0] / _PLAIN, weights_only=True)
    return int(newest[0].name.removeprefix(_PREFIX)), plain


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
    """Writes a checkpoint to one side and renames it."""
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
        _sync(writing / _TENSORS, writing)
        shutil.rmtree(final, ignore_errors=True)
        writing.rename(final)
        _sync(state)


def _saved(state: Path) -> list[Path]:
    return sorted(state.glob(f"{_PREFIX}*"))


def _sync(*folders: Path) -> None:
    """A new file's name is durable only once its folder has been synced."""
    for folder in folders:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
