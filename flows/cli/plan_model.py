"""How a base model in a local folder would run, for `r1 plan`: packed, plain, or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from flows.recipe.schema import Recipe
from grpo.config.common import Hardware
from grpo.errors import InputError
from tasks.paths import expanded

WEIGHTS = "*.safetensors"
SHARE_OF_MEMORY = 0.5
"""Weights larger than this share of the machine's memory are not loaded for a plan."""


def check(recipe: Recipe, stages: Iterable[str] | None = None) -> dict[str, Any] | None:
    """The result of `grpo.check_model`, run in its own process because a model's files are untrusted and its memory is
    to be freed afterwards. None without a local folder.

    `stages`: those whose `hardware` says how the model is to run; None: all. If they say different things, the result
    has the `stages` it is for, and `others` has results for the rest.

    Raises:
        InputError: a stage cannot run the model.
    """
    folder = expanded(recipe.base.model) if recipe.base.model else None
    if folder is None or not folder.is_dir():
        return None
    size = sum(path.stat().st_size for path in folder.glob(WEIGHTS))
    if size > SHARE_OF_MEMORY * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return {"attention": None, "reason": f"its {size / 1e9:.0f} GB are too large to load here; stages check it"}
    asked = _asked(recipe, stages)
    first, *others = [_checked(folder, recipe.base.remote_code, flags, names) for flags, names in asked.items()]
    if not others:
        del first["stages"]
    return first | ({"others": others} if others else {})


def _checked(folder: Path, remote_code: bool, flags: tuple[str, ...], stages: list[str]) -> dict[str, Any]:
    flags = (*flags, *(["--remote-code"] if remote_code else []))
    command = [sys.executable, "-m", "grpo.check_model", *flags, str(folder)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = done.stderr.strip().splitlines() or [f"the check ended with exit code {done.returncode}"]
    if done.returncode:
        of_stages = f" in {', '.join(stages)}" if flags else ""
        raise InputError(f"base.model{of_stages}: {lines[-1].removeprefix('error: ')}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result | {"stages": stages}


def _asked(recipe: Recipe, stages: Iterable[str] | None) -> dict[tuple[str, ...], list[str]]:
    """The stages by the flags of `grpo.check_model` that their hardware settings mean."""
    asked: dict[tuple[str, ...], list[str]] = {}
    for name in Recipe.model_fields if stages is None else stages:
        if name == "distill":  # trains other models
            continue
        for hardware in _hardware_in(getattr(recipe, name, None)):
            flags = [] if hardware.attention == "auto" else ["--attention", hardware.attention]
            names = asked.setdefault((*flags, *([] if hardware.fused else ["--unfused"])), [])
            names += [] if name in names else [name]
    return asked or {(): []}


def _hardware_in(section: Any) -> Iterator[Hardware]:
    if isinstance(section, Hardware):
        yield section
    elif isinstance(section, BaseModel):
        for name in type(section).model_fields:
            yield from _hardware_in(getattr(section, name))


def describe(found: dict[str, Any]) -> str:
    """One sentence of `r1 plan` for each way that stages ask for: how the base model would run, why it would not run
    packed, if so, and what transformers' own code does."""
    if found["attention"] is None:
        return f"base.model is not checked: {found['reason']}"
    return "; ".join(map(_described, [found, *found.get("others", [])]))


def _described(found: dict[str, Any]) -> str:
    stages = f" in {', '.join(found['stages'])}" if "stages" in found else ""
    why = f", not packed ({found['reason']}): slower, see docs/models.md" if found["reason"] else ""
    by_transformers = f" ({found['by_transformers']})" if found["by_transformers"] else ""
    return f"base.model runs {found['attention']}{why}{by_transformers}{stages}"
