"""An error that nobody expected: one line, and the traceback in a file."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli import main as module
from tests.support.r1 import R1, ROOT


def test_one_line_and_the_traceback_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(args: object) -> int:
        raise RuntimeError("Error\n500 at https://me:hunter2@host")

    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    monkeypatch.setattr(module, "prepare_environment", lambda: None)
    monkeypatch.setitem(module.COMMANDS, "stages", breaks)
    assert module.main(["stages"]) == 1
    log = tmp_path / "logs" / "errors.log"
    said = f"failed: RuntimeError: Error 500 at https://***@host; the traceback is in {log}\n"
    assert capsys.readouterr().err == said
    assert "in breaks" in log.read_text() and "hunter2" not in log.read_text()


def test_a_line_that_cannot_be_logged_prints_no_traceback() -> None:
    # As where memory runs out while a warning is formatted, between the failure and the line that says so.
    code = (
        "import logging, sys; sys.argv[1:] = ['--version']; from flows.cli import __main__\n"
        "try: __main__.main()\nexcept SystemExit: pass\n"
        "logging.basicConfig(); logging.getLogger('flows').warning('%d', 'no number')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("r1flow ") and done.stderr == ""


def test_exhausted_memory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(args: object) -> int:
        raise RuntimeError("no engine") from MemoryError()

    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    monkeypatch.setattr(module, "prepare_environment", lambda: None)
    monkeypatch.setitem(module.COMMANDS, "stages", breaks)
    assert module.main(["stages"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: memory ran out: end other programs") and said.count("\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_ends_is_no_error(tmp_path: Path, unbuffered: str) -> None:
    r1 = R1(tmp_path)
    environment = r1.environment() | {"PYTHONUNBUFFERED": unbuffered}
    command = subprocess.Popen(
        r1.command("recipes"), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None and command.stderr is not None
    command.stdout.close()  # as `head` does when it has enough
    assert command.stderr.read() == "" and command.wait() == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    ("command", "megabytes", "needed"),
    [
        ("plan", 60, 200),  # NumPy's OpenBLAS ended the process while it was loaded
        ("plan", 199, 200),
        ("run", 320, 600),  # an allocator of Rust aborted it while MLflow made its database
        ("run", 599, 600),
    ],
)
def test_too_little_memory_for_a_command_is_one_line(tmp_path: Path, command: str, megabytes: int, needed: int) -> None:
    r1, limit = R1(tmp_path), megabytes * 10**6
    done = subprocess.run(
        r1.command(command, "tiny"),
        env=r1.environment(),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: memory ran out: ") and done.stderr.count("\n") == 1
    assert done.stderr.endswith(f"; this process may hold {megabytes} MB and needs {needed} MB\n")
