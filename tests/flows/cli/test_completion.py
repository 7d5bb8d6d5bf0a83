"""`r1 completion`: what a shell shows after Tab."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main as cli
from flows.cli.completion import SHELLS
from flows.recipe.shipped import shipped

R1 = Path(sys.executable).parent / "r1"
TAB = """
source <(R1FLOW_HOME=$PWD/first "$R1" completion bash)
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
read -ra COMP_WORDS <<< "$1"
_python_argcomplete "$R1"
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""What bash does at Tab, after the line $1."""


def script(shell: str, capsys: Any) -> str:
    assert cli.main(["completion", shell]) == 0
    return str(capsys.readouterr().out)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("r1 pr", ["promote", "prune"]),
        ("r1 plan --es", ["--estimate"]),
        ("r1 run tiny --flow rl", ["rlhf_ppo"]),
        ("r1 plan t", ["tiny", "team.toml"]),
        ("r1 init mine.toml --from q", [name for name in shipped() if name.startswith("q")]),
        ("r1 completion ", ["bash", "zsh", "fish", "-h", "--help"]),
    ],
)
def test_bash_shows_what_fits(line: str, shown: list[str], tmp_path: Path) -> None:
    (tmp_path / "team.toml").touch()
    (tmp_path / "table.csv").touch()
    command = ["bash", "-c", TAB, "bash", line]
    environment = os.environ | {"R1": str(R1), "R1FLOW_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert {word.strip() for word in done.stdout.splitlines()} == set(shown), done.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("shell", "registers"),
    [
        ("bash", "complete -o nospace -o default -o bashdefault -F _python_argcomplete r1"),
        ("zsh", "compdef _python_argcomplete r1"),
        ("fish", "complete --command r1 -f -a '(__fish_r1_complete)'"),
    ],
)
def test_each_shells_script_registers_r1(shell: str, registers: str, capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(script(shell, capsys))
    assert registers in map(str.strip, path.read_text().splitlines())
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(path)], check=True)


def test_another_shell_is_one_line_that_names_the_three(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", "tcsh"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and all(shell in said for shell in SHELLS)
