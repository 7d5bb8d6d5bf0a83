"""What a run says when MLflow cannot be used, and signals that arrive while it writes."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from grpo.errors import InputError
from tasks.tracking.client import Tracking
from tasks.tracking.connection import Connection, default_uri


def test_exhausted_memory_is_no_failure_of_mlflow(tmp_path: Path) -> None:
    def query(cause: Exception | None = None) -> None:
        raise RuntimeError("the database failed") from cause

    with pytest.raises(InputError, match="^memory ran out: end other programs"):
        Connection(default_uri(tmp_path)).or_stop(lambda: query(MemoryError()))
    with pytest.raises(InputError, match="^MLflow at sqlite:.* failed: "):
        Connection(default_uri(tmp_path)).or_stop(query)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_within_a_transaction_leaves_the_file_unlocked(tmp_path: Path, number: signal.Signals) -> None:
    """The handler raised after the INSERT. The transaction then stayed open for the life of the process, and each later
    call waited 20 s for its lock and failed."""
    record = Tracking(default_uri(tmp_path))
    run = record.recipe_run("recipe", "run", {}, {})
    sent: list[str] = []

    def send(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO metrics") and not sent:
            sent.append(statement)
            os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    event.listen(Engine, "after_cursor_execute", send)
    try:
        with pytest.raises(KeyboardInterrupt) as stopped:
            record.log_metrics(run, [{"step": 1, "loss": 2.5}])
    finally:
        event.remove(Engine, "after_cursor_execute", send)
        signal.signal(signal.SIGTERM, before)
    assert sent
    with closing(sqlite3.connect(tmp_path / "mlflow.db", timeout=0)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert other.execute("SELECT value FROM metrics").fetchall() == [(2.5,)]
        other.rollback()
    record.fail(run, stopped.value, {"how": "stopped"})
    assert record.reader.run(run).status == "KILLED"  # type: ignore[union-attr]
