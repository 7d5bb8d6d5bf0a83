"""Talking to a checkpoint through the terminal program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def chat(*arguments: str, said: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "grpo.chat", *arguments, "--max-new-tokens", "5"]
    return subprocess.run(command, input=said, capture_output=True, text=True, cwd=ROOT)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    done = chat(str(tmp_path), said="hello\n")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: {tmp_path}: not a model folder (config.json is missing)"
