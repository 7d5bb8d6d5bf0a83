"""Checkpoints that a killed job continues from: written aside, then renamed, so that half a one is never seen."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

_PREFIX = "step-"


def save(state: Path, step: int, payload: dict[str, Any]) -> None:
    """Keep `payload` (tensors, state dicts, numbers) for `step`; older checkpoints go once it is safely there."""
    state.mkdir(parents=True, exist_ok=True)
    temporary, final = state / "writing", state / f"{_PREFIX}{step:08d}"
    with temporary.open("wb") as file:
        torch.save(payload, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(final)
    for older in _saved(state):
        if older != final:
            older.unlink()


def load_latest(state: Path) -> tuple[int, dict[str, Any]] | None:
    """The newest complete checkpoint as (step, payload)."""
    saved = _saved(state)
    if not saved:
        return None
    return int(saved[-1].name.removeprefix(_PREFIX)), torch.load(saved[-1], weights_only=True)


def rng_state() -> dict[str, Any]:
    """Where every random generator stands that a library draws from without being asked."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """The inverse of `rng_state`."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def clear(state: Path) -> None:
    shutil.rmtree(state, ignore_errors=True)


def _saved(state: Path) -> list[Path]:
    return sorted(state.glob(f"{_PREFIX}*"))
