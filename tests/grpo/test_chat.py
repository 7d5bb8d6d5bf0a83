"""Talking to a checkpoint through the terminal program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpo.chat import main

ROOT = Path(__file__).parents[2]


def chat(*arguments: str, said: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "grpo.chat", *arguments, "--max-new-tokens", "5"]
    return subprocess.run(command, input=said, capture_output=True, text=True, cwd=ROOT)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    done = chat(str(tmp_path), said="hello\n")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: {tmp_path}: not a model folder (config.json is missing)"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--temperature", "0", "--temperature 0.0: Input should be greater than 0"),
        ("--max-new-tokens", "0", "--max-new-tokens 0: Input should be greater than or equal to 1"),
        ("--top-p", "0", "--top-p 0.0: Input should be greater than 0"),
        ("--zero-template", "/no/template", "--zero-template /no/template: No such file or directory"),
    ],
)
def test_a_bad_option_is_one_line_before_the_model_loads(
    capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    """The folder of the model is not there, and nobody noticed."""
    assert main(["/no/model", option, value]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
