"""The files of people's decisions: any note can be read back, and a kill costs at most the line that it cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.gates.approvals import Decision, Decisions


def decision(note: str) -> Decision:
    return Decision.now("g", True, "ada", note, "digest")


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\n"])
def test_a_note_may_hold_any_separator_of_lines(tmp_path: Path, separator: str) -> None:
    made = decision(f"looks{separator}fine")
    Decisions(tmp_path).add("key", made)
    assert Decisions(tmp_path).of("key") == [made]


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_a_decision_after_a_line_that_was_cut_off_is_found(tmp_path: Path, cut: int) -> None:
    first, cut_off, last = decision("one"), decision("tw\u00f6"), decision("three")
    decisions, file = Decisions(tmp_path), tmp_path / "gates" / "key.jsonl"
    decisions.add("key", first)
    whole = len(file.read_bytes())
    decisions.add("key", cut_off)
    file.write_bytes(file.read_bytes()[: whole + cut] if cut > 0 else file.read_bytes()[:cut])
    # Without its line break, a line is whole nevertheless.
    kept = [first] if cut > 0 else [first, cut_off]
    assert decisions.of("key") == kept
    decisions.add("key", last)
    assert decisions.of("key") == [*kept, last]


def test_a_line_that_ends_within_a_character_is_skipped(tmp_path: Path) -> None:
    decisions, file = Decisions(tmp_path), tmp_path / "gates" / "key.jsonl"
    decisions.add("key", decision("\u00f6"))
    file.write_bytes(file.read_bytes().partition("\u00f6".encode())[0] + b"\xc3")
    assert decisions.of("key") == []
