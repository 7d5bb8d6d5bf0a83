"""Checkpoints that a killed job continues from: written aside, then renamed, so that half a one is never seen."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

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


def clear(state: Path) -> None:
    shutil.rmtree(state, ignore_errors=True)


def _saved(state: Path) -> list[Path]:
    return sorted(state.glob(f"{_PREFIX}*"))
