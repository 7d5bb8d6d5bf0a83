"""Steps of worked calculations, right and wrong, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.evaluation.steps import step_metrics, steps_right


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("first 3 - 7 + 7\nthen -4 + 7\nthen 3\nso the result is 3", [True, True, True]),
        # A slip in the second step: the third is right again, though the result is wrong.
        ("first 3 - 7 + 7\nthen 4 + 7\nthen 11\nso the result is 11", [True, False, True]),
        ("<think>\nzuerst 3 - 7 + 7\ndann 4 + 7\n</think>\n<answer>11</answer>", [True, False]),
        ("4 - 1 = 3\n3 - 7 = 4\n4 + 7 = 11", [True, False, True]),
        ("the result is 3", []),
        ("first 3\nso the result is 3\n3", [True]),
        ("let me see", []),
        ("", []),
    ],
)
def test_each_step_is_judged_by_itself(problem: Any, completion: str, right: list[bool]) -> None:
    assert steps_right(problem(text="compute 4 - 1 - 7 + 7", answer="3"), completion) == right


def test_numbers_in_words_are_no_steps_of_a_word_problem(problem: Any) -> None:
    hens = problem(text="325 chickens, 28 roosters, 20 do not lay. How many lay?", answer="277")
    assert steps_right(hens, "There are 28 roosters.\nSo 325 - 28 = 297\nand 297 - 20 = 276\n") == [True, False]


def test_metrics_of_steps(problem: Any, sample: Any) -> None:
    known = {"a": problem("a", "compute 1 + 2 + 3", "6")}
    texts = ("first 3 + 3\nthen 6\nthe result is 6", "first 4 + 3\nthen 7\nthe result is 7", "the result is 6")
    rows = [
        sample("a", completion=text, rewards={"accuracy": 0.0, "stated": stated})
        for text, stated in zip(texts, (1.0, 0.0, 1.0), strict=True)
    ]
    # Two of three work it out, one of these is right, and three of their four steps: 4 + 3 = 7 is.
    assert step_metrics(rows, known) == {"stepwise": 2 / 3, "steps_right": 0.75, "stated_stepwise": 0.5}
    assert step_metrics(rows[2:], known) == {}
