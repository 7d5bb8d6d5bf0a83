"""How a base model in a local folder would run, for `r1 plan`: packed, plain, or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from flows.recipe.schema import Recipe
from grpo.errors import InputError

WEIGHTS = "*.safetensors"
SHARE_OF_MEMORY = 0.5
"""Weights larger than this share of the machine's memory are not loaded for a plan."""


def check(recipe: Recipe) -> dict[str, Any] | None:
    """The result of `grpo.check_model`, run in its own process because a model's files are untrusted and its memory is
    to be freed afterwards. None without a local folder.

    Raises:
        InputError: no stage can run the model.
    """
    folder = Path(recipe.base.model).expanduser() if recipe.base.model else None
    if folder is None or not folder.is_dir():
        return None
    size = sum(path.stat().st_size for path in folder.glob(WEIGHTS))
    if size > SHARE_OF_MEMORY * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return {"attention": None, "reason": f"its {size / 1e9:.0f} GB are too large to load here; stages check it"}
    flags = ["--remote-code"] if recipe.base.remote_code else []
    command = [sys.executable, "-m", "grpo.check_model", *flags, str(folder)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = done.stderr.strip().splitlines() or [f"the check ended with exit code {done.returncode}"]
    if done.returncode:
        raise InputError(f"base.model: {lines[-1].removeprefix('error: ')}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def describe(found: dict[str, Any]) -> str:
    """One line of `r1 plan`: how the base model would run, and why it would not run packed, if so."""
    if found["attention"] is None:
        return f"base.model is not checked: {found['reason']}"
    why = f", not packed ({found['reason']}): slower, see docs/models.md" if found["reason"] else ""
    return f"base.model runs {found['attention']}{why}"
