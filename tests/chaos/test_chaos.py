"""The suite itself: a short form with a real kill, and its journal and table."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.__main__ import attempt
from tests.chaos.faults.all import KINDS
from tests.chaos.homes import Homes
from tests.chaos.servers import Server
from tests.chaos.table import page, read, table
from tests.chaos.trial import BY_RERUN, CLEAR, HEALED, WRONG, Ended


def test_there_are_thirty_kinds_and_a_try_is_the_same_each_time() -> None:
    assert len(KINDS) >= 30
    kind = KINDS["SIGKILL of the flow"]
    assert kind.choose(random.Random("0 a 1")) == kind.choose(random.Random("0 a 1"))
    assert {kind.choose(random.Random(n))[0] for n in range(50)} == set(kind.targets)


def test_a_clear_failure_is_one_line_and_the_right_exit_code() -> None:
    line = "error: sft: no space left on /home: free some\n"
    assert Ended(2, f"sft: step 1/18\r{line}", 1.0).is_clear
    assert not Ended(3, line, 1.0).is_clear
    assert not Ended(1, "Traceback (most recent call last):\n  ...\nOSError: no space\n", 1.0).is_clear
    assert not Ended(1, f"Traceback (most recent call last):\n{line}", 1.0).is_clear
    assert not Ended(1, "sft failed\n", 1.0).is_clear


def test_the_journal_survives_a_kill_and_the_table_counts_the_newest_record(tmp_path: Path) -> None:
    journal, records = tmp_path / "journal.jsonl", []
    for number, outcome in [(0, WRONG), (0, HEALED), (1, CLEAR), (2, BY_RERUN), (3, WRONG)]:
        records.append({"kind": "k", "number": number, "seed": 0, "outcome": outcome, "why": "w", "commit": "abc"})
    journal.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"kind": "k", "num')
    assert "| k | 4 | 1 | 1 | 1 | 1 |" in table(read(journal))
    target = tmp_path / "page.md"
    target.write_text("before\n<!-- table -->\nold\n<!-- end -->\nafter\n")
    page(target, read(journal), ["k", "l"], "command", "machine")
    text = target.read_text()
    assert "old" not in text and text.startswith("before") and text.endswith("after\n")
    assert "Without a try so far: l." in text and "- k (try 3, abc): w" in text and "abc (4)" in text


@pytest.mark.system
def test_a_stage_that_is_killed_is_made_by_the_rerun(tmp_path: Path) -> None:
    server = Server("prefect", tmp_path / "server", tmp_path / "prefect.log")
    try:
        homes = Homes(tmp_path / "homes", prefect=server.url)
        homes.build(["problems"])
        record = attempt(homes, replace(KINDS["SIGKILL of the flow"], targets=("problems",)), 0, 0)
        assert record["outcome"] in (BY_RERUN, HEALED), record["why"]
    finally:
        server.stop()
