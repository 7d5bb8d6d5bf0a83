"""The command `r1 chat`."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from flows.home import store
from grpo.errors import InputError


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("chat", help="talk to a checkpoint")
    command.add_argument("model", help="a stage, a key, champion, NAME@RECIPE, or a Hugging Face folder")
    command.add_argument("--temperature", type=float, default=0.6)
    command.add_argument("--max-new-tokens", type=int, default=256)


def run(args: argparse.Namespace) -> int:
    """Starts a chat in a process of its own. Returns its exit code."""
    path, template = _checkpoint(args.model)
    command = [sys.executable, "-m", "grpo.chat", str(path), "--temperature", str(args.temperature)]
    command += ["--max-new-tokens", str(args.max_new_tokens)]
    if template is not None:
        command += ["--template", "r1_zero", "--zero-template", str(template)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": _import_path()}).returncode


def _checkpoint(name: str) -> tuple[Path, Path | None]:
    """The model's folder, and its plain-text template if it has no chat template."""
    from flows.stages.base_model import ZERO_TEMPLATE_FILE
    from flows.stages.evaluate import CHECKPOINTS, checkpoints, stage_of
    from flows.stages.references import CHAMPION, artifact

    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder, folder / ZERO_TEMPLATE_FILE if (folder / ZERO_TEMPLATE_FILE).is_file() else None
    if name.startswith((".", "/", "~")):
        raise InputError(f"{name}: no such folder")
    stage = stage_of(name)
    if checkpoints([stage]):
        name = f"latest:{stage}"
    elif name.isidentifier() and name != CHAMPION and not re.fullmatch("[0-9a-f]{6,}", name):
        known = ", ".join([*CHECKPOINTS.values(), "student_NAME"])
        raise InputError(f"{name}: no checkpoint has this name; these do: {known}")
    manifest = artifact(name)
    if not checkpoints([manifest.stage]):
        known = ", ".join([*CHECKPOINTS, "student_NAME"])
        raise InputError(f"{name}: stage {manifest.stage!r} makes no checkpoint; these do: {known}")
    if manifest.stage not in ("base", "r1_zero"):
        return manifest.path, None
    base = manifest if manifest.stage == "base" else store().resolve(manifest.inputs["base"].key or "")
    return manifest.path, base.path / ZERO_TEMPLATE_FILE


def _import_path() -> str:
    import grpo

    return os.pathsep.join(filter(None, [str(Path(grpo.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
