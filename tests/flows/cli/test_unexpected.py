"""An error that nobody expected: one line, and the traceback in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.cli import main as module


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
