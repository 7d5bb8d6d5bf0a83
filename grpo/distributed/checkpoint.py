"""Checkpoints that a killed job continues from: written aside, then renamed, so that half a one is never seen.

One is a folder: tensors, of which each process writes its shares, and beside them plain data from the first process.
Any number of processes reads what any other wrote.
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
    """Keep the tensors of `modules` and `optimizers`, and the first process's `plain` data, for `step`; older
    checkpoints go once it is safely there. All processes call it, and see it when they return."""
    writing, final = state / "writing", state / f"{_PREFIX}{step:08d}"
    if parallel.main:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    parallel.barrier()
    if not writing.is_dir():
        raise InputError(f"{state}: not shared with the first process's machine; keep it on a shared file system")
    tensor_io.write(writing / _TENSORS, modules, optimizers)
    if parallel.main:
        with (writing / _PLAIN).open("wb") as file:
            torch.save(plain, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(writing / _TENSORS, writing)
        writing.rename(final)
        _sync(state)
        for older in _saved(state):
            if older != final:
                shutil.rmtree(older)
    parallel.barrier()


def load_latest(
    parallel: Parallel, state: Path, modules: Modules, optimizers: Optimizers
) -> tuple[int, dict[str, Any]] | None:
    """Put the newest checkpoint's tensors into `modules` and `optimizers`; its (step, plain data), or None."""
    newest = parallel.same(_saved(state)[-1:])
    if not newest:
        return None
    tensor_io.read(newest[0] / _TENSORS, modules, optimizers)
    plain = torch.load(newest[0] / _PLAIN, weights_only=True)
    return int(newest[0].name.removeprefix(_PREFIX)), plain


def rng_state() -> dict[str, Any]:
    """Where every random generator stands that a library draws from without being asked."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,  # of this process's own
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """The inverse of `rng_state`."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _saved(state: Path) -> list[Path]:
    return sorted(state.glob(f"{_PREFIX}*"))


def _sync(*folders: Path) -> None:
    """Names of files are safe only once their folder is."""
    for folder in folders:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
