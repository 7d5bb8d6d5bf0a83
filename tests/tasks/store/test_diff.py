"""What differs between configurations."""

from __future__ import annotations

from tasks.store.diff import changed, short


def test_leaves_that_differ() -> None:
    old = {"rl": {"lr": 1, "steps": [1, 2]}, "gone": True}
    new = {"rl": {"lr": 2, "steps": [1, 3]}}
    assert changed(old, new) == [("gone", True, None), ("rl.lr", 1, 2), ("rl.steps.1", 2, 3)]
    assert changed(old, old) == []


def test_lists_of_two_lengths_differ_as_a_whole() -> None:
    assert changed({"a": [1]}, {"a": [1, 2]}) == [("a", [1], [1, 2])]


def test_a_long_value_is_cut() -> None:
    assert short({"a": 1}) == '{"a": 1}' and short("x" * 50) == "x" * 39 + "…"
