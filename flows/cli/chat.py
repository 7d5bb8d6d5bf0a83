"""The command `r1 chat`."""

from __future__ import annotations

import argparse
import os
import subprocess
from typing import Any

from flows.cli.models import find_model
from tasks.trainer.interpreter import library_path, trainer_python


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("chat", help="talk to a checkpoint")
    command.add_argument("model", help="a stage, a key, champion, NAME@RECIPE, or a Hugging Face folder")
    command.add_argument("--temperature", type=float, default=0.6)
    command.add_argument("--max-new-tokens", type=int, default=256)


def run(args: argparse.Namespace) -> int:
    """Starts a chat in its own process. Returns the exit code of that process."""
    path, template = find_model(args.model)
    command = [trainer_python(), "-m", "grpo.chat", str(path), "--temperature", str(args.temperature)]
    command += ["--max-new-tokens", str(args.max_new_tokens)]
    if template is not None:
        command += ["--template", "r1_zero", "--zero-template", str(template)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": _import_path()}).returncode


def _import_path() -> str:
    return os.pathsep.join(filter(None, [library_path(), os.environ.get("PYTHONPATH")]))
