"""`r1 runs` and `r1 show` on a real run, and lines that fit the terminal."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main as cli
from flows.cli.terminal import fit, width
from tasks.tracking.connection import default_uri
from tests.support.small_home import SmallHome


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_cut_for_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert fit("x" * 21, Terminal()) == "x" * 19 + "…" and fit("x" * 20, Terminal()) == "x" * 20
    assert fit("x" * 500, io.StringIO()) == "x" * 500
    monkeypatch.delenv("COLUMNS")
    assert width(Terminal()) is None  # it has no descriptor to ask
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal, os.fdopen(master):
        import fcntl
        import struct
        import termios

        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 66, 0, 0))
        assert width(terminal) == 66


@pytest.fixture
def command(small_home: SmallHome, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A command of r1 in this process, in the small home."""
    monkeypatch.setenv("R1FLOW_HOME", str(small_home.path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", default_uri(small_home.path))

    def run(*arguments: str) -> int:
        given = cli.parser().parse_args(arguments)
        return cli.COMMANDS[given.command](given)

    return run


def test_runs_are_listed_newest_first(command: Any, small_home: SmallHome, capsys: Any) -> None:
    assert command("runs", "--json") == 0
    second, first = json.loads(capsys.readouterr().out)["runs"]
    assert (first["id"], second["id"]) == (small_home.first, small_home.second)
    assert (first["recipe"], first["flow"], first["seed"], first["status"]) == ("sums", "train_r1", "0", "FINISHED")
    assert (first["overrides"], second["overrides"]) == ("", "reasoning_rl.kl_coef=0.01")
    assert first["failed"] is None and first["seconds"] >= 0
    assert command("runs", "--recipe", "sums", "--last", "1") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(small_home.second[:8]) and line.endswith("finished  reasoning_rl.kl_coef=0.01")
    assert command("runs", "--recipe", "none") == 0
    assert capsys.readouterr().err == "no run of recipe 'none' yet; `r1 run none` makes the first\n"


def test_a_home_without_runs_is_not_given_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", default_uri(tmp_path))
    assert cli.COMMANDS["runs"](cli.parser().parse_args(["runs"])) == 0
    assert capsys.readouterr().err == "no run yet; `r1 run tiny` makes the first\n" and not list(tmp_path.iterdir())


def test_an_artifact_is_shown_for_people_and_as_json(command: Any, small_home: SmallHome, capsys: Any) -> None:
    evaluation = small_home.store.resolve("latest:evaluate")
    assert command("show", "latest:evaluate", "--json") == 0
    manifest = json.loads(capsys.readouterr().out)  # all of it
    assert (manifest["stage"], manifest["key"], manifest["stale"]) == ("evaluate", evaluation.key, None)
    assert set(manifest["inputs"]) == {"problems", "cold_start_sft", "reasoning_rl"}
    assert command("show", evaluation.key[:10]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"evaluate  {evaluation.key}" and "  problems = 4" in lines
    made_from = [line.split(":")[0] for line in lines[lines.index("Made from:") + 1 :]]
    assert made_from == [
        *("  problems", "  cold_start_sft", "    problems", "  reasoning_rl", "    problems", "    cold_start_sft")
    ]


def test_artifacts_are_listed(command: Any, capsys: Any) -> None:
    assert command("stages", "--json") == 0
    stages = [of["stage"] for of in json.loads(capsys.readouterr().out)["artifacts"]]
    assert stages == ["problems", "cold_start_sft", "reasoning_rl", "evaluate", "reasoning_rl", "evaluate"]
    assert command("stages") == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == stages
