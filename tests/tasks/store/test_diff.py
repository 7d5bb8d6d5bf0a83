"""Differences between configurations."""

from __future__ import annotations

from tasks.store.diff import Difference, changed_fields, shorten


def test_leaves_that_differ() -> None:
    old = {"rl": {"lr": 1, "steps": [1, 2]}, "gone": True}
    new = {"rl": {"lr": 2, "steps": [1, 3]}}
    assert changed_fields(old, new) == [("gone", True, None), ("rl.lr", 1, 2), ("rl.steps.1", 2, 3)]
    assert changed_fields(old, old) == []


def test_lists_of_two_lengths_differ_as_a_whole() -> None:
    assert changed_fields({"a": [1]}, {"a": [1, 2]}) == [("a", [1], [1, 2])]


def test_a_long_value_is_cut() -> None:
    assert shorten({"a": 1}) == '{"a": 1}' and shorten("x" * 50) == "x" * 39 + "…"


def test_a_changed_text_is_shown_from_where_it_differs() -> None:
    old, new = f"{'same words ' * 9}and an end", f"{'same words ' * 9}and another end, which is much longer"
    said = str(Difference("field", "template", old, new))
    assert said == "template: …rds and an end -> …rds and another end, which is much lon…"
    assert str(Difference("field", "kl_coef", 0.001, None)) == "kl_coef: 0.001 -> None"
