"""The lines of a recipe's progress in a log, which Prefect shows as the Logs of a flow run."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console

from flows import progress as module
from flows.progress import Progress, checkpoint_line, finished_line
from flows.stage_contract.run_page import RunPage
from flows.stage_contract.stage_progress import StageProgress


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    module.logger.addHandler(handler)
    yield records
    module.logger.removeHandler(handler)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_one_line_an_interval_and_the_first_and_last_step(told: list[logging.LogRecord], clock: list[float]) -> None:
    progress = Progress(Console(file=io.StringIO()))
    for step in range(1, 8):
        progress.update("sft", "", {"step": step, "of": 7, "loss": 0.5})
        clock[0] += 4.0  # s; an interval has 10
    assert [record.getMessage().split(" · ")[0] for record in told] == [
        *("sft: step 1/7", "sft: step 4/7", "sft: step 7/7")
    ]
    assert told[1].getMessage() == "sft: step 4/7 · loss 0.500 · 12s left"
    assert {record.levelno for record in told} == {logging.INFO}


def test_steps_before_a_resumed_attempt_say_nothing_about_its_speed(
    told: list[logging.LogRecord], clock: list[float]
) -> None:
    progress = StageProgress("sft", Progress(Console(file=io.StringIO())), RunPage("sft"))
    progress.show("", [{"step": step, "of": 40} for step in range(1, 21)])
    clock[0] += 30.0
    progress.show("", [{"step": 21, "of": 40}])
    assert [record.getMessage() for record in told] == ["sft: step 20/40", "sft: step 21/40 · 9m30s left"]


def test_each_job_of_a_stage_begins_an_interval(told: list[logging.LogRecord], clock: list[float]) -> None:
    progress = Progress(Console(file=io.StringIO()))
    for job in ("helpful", "safe"):
        progress.update("reward_models", job, {"step": 1, "of": 9})
    assert [record.getMessage() for record in told] == [f"reward_models/{job}: step 1/9" for job in ("helpful", "safe")]


def test_a_failure_is_an_error_without_its_secrets(told: list[logging.LogRecord]) -> None:
    progress = Progress(Console(file=io.StringIO()))
    progress.failed("sft", "no answer from https://ada:hunter2@judge/v1")
    assert told[0].levelno == logging.ERROR
    assert "hunter2" not in told[0].getMessage() and told[0].getMessage().startswith("sft: failed: no answer from ")


def test_a_terminal_obeys_no_text_of_a_model(told: list[logging.LogRecord]) -> None:
    written = io.StringIO()
    Progress(Console(file=written)).say("a\tb\x1b]52;c;aGk=\x07\x9b2J\x7f\r\nç")
    Progress(Console(file=written)).failed("sft", "it said \x1b[2J")
    said = written.getvalue() + "".join(record.getMessage() for record in told)
    assert not {"\x1b", "\x07", "\x9b", "\x7f", "\r"} & set(said)
    assert told[0].getMessage() == "a\tb\ufffd]52;c;aGk=\ufffd\ufffd2J\ufffd\ufffd\nç"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_row_is_cut_on_a_terminal_and_a_message_goes_on_in_the_next_line(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: terminal)
    monkeypatch.setattr(module.sys, "stderr", written)
    monkeypatch.setenv("COLUMNS", "48")
    progress = Progress()
    progress.finished("sft", "ran", 200, {"loss": 0.4124, "accuracy": 0.5, "format": 0.75}, {})
    progress.say("word " * 30 + "end")
    row, *message = written.getvalue().splitlines()
    whole = "sft                 3m20s  loss 0.412 · accuracy 0.500 · format 0.750"
    if terminal:
        assert row == whole[:47] + "…" and len(message) == 4 and all(40 < len(line) <= 48 for line in message[:3])
    else:
        assert row == whole and len(message) == 1
    assert " ".join(" ".join(message).split()) == "word " * 30 + "end"


def test_a_checkpoint_is_a_line_of_its_numbers() -> None:
    assert checkpoint_line("dev1", {"pass@1": 0.5, "pass@1_ci95": [0.4, 0.6], "k": 4}) == "dev1: pass@1 0.500"


def test_a_result_has_counts_and_numbers() -> None:
    assert finished_line("sft", "ran", 200, {"examples": 1024, "cut": 0, "loss": 0.4124}) == (
        "sft: made in 3m20s · examples 1,024 · loss 0.412"
    )
    assert finished_line("base", "reused", 200, {"loss": None}) == "base: reused"
