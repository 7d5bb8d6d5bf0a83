"""The command `r1 chat`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from flows.home import store
from grpo.errors import InputError


def add(commands: Any) -> None:
    command = commands.add_parser("chat", help="talk to a checkpoint")
    command.add_argument("model", help="a stage, a key, champion, NAME@RECIPE, or a Hugging Face folder")
    command.add_argument("--temperature", type=float, default=0.6)
    command.add_argument("--max-new-tokens", type=int, default=256)


def run(given: argparse.Namespace) -> int:
    from flows.base import ZERO_TEMPLATE_FILE
    from flows.evaluate import CHECKPOINTS, checkpoints, stage_of
    from flows.references import artifact

    if Path(given.model).is_dir():
        path, stage = Path(given.model), None
    else:
        stage = stage_of(given.model)
        manifest = artifact(f"latest:{stage}" if checkpoints([stage]) else given.model)
        path, stage = manifest.path, manifest.stage
        if not checkpoints([stage]):
            known = ", ".join([*CHECKPOINTS, "student_NAME"])
            raise InputError(f"{given.model}: stage {stage!r} makes no checkpoint; these do: {known}")
    command = [sys.executable, "-m", "grpo.chat", str(path), "--temperature", str(given.temperature)]
    command += ["--max-new-tokens", str(given.max_new_tokens)]
    if stage in ("base", "r1_zero"):
        template = path if stage == "base" else store().resolve(manifest.inputs["base"].key or "").path
        command += ["--template", "r1_zero", "--zero-template", str(template / ZERO_TEMPLATE_FILE)]
    elif stage is None and (path / ZERO_TEMPLATE_FILE).is_file():
        command += ["--template", "r1_zero", "--zero-template", str(path / ZERO_TEMPLATE_FILE)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": _import_path()}).returncode


def _import_path() -> str:
    import grpo

    return os.pathsep.join(filter(None, [str(Path(grpo.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
