"""Votes of samples, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.evaluation.metrics import problem_scores
from tasks.evaluation.votes import classify, consensus, votes

NOTHING_RIGHT = [False] * 9


def test_equal_values_are_one_vote_under_math(problem: Any) -> None:
    asked = problem(answer="0.5", verifier="math")
    answers = ["1/2", "0.4", "0.5", "", "\\frac{1}{2}", "2/5", "$x+1$", "1+x"]
    right = [True, False, True, False, True, False, False, False]
    assert classify(asked, answers, right) == [0, 1, 0, None, 0, 1, 6, 6]
    # The same where none of them is right.
    asked = problem(answer="17", verifier="math")
    assert classify(asked, answers, NOTHING_RIGHT[:8]) == [0, 1, 0, None, 0, 1, 6, 6]


@pytest.mark.parametrize(
    ("verifier", "answers", "classes"),
    [
        ("number", ["1,000", "1000", "1e3", "999"], [0, 0, 0, 3]),
        ("choice", ["(b)", "B. 42", "the answer is C", "b"], [0, 0, 2, 0]),
        ("exact", ["Paris", " paris.", "Rome"], [0, 0, 2]),
        ("reasoning_gym", ["12", "12.0", "twelve"], [0, 0, 2]),  # its scorer compares with nothing: by value
    ],
)
def test_each_verifier_says_what_is_equal(problem: Any, verifier: str, answers: list[str], classes: list[int]) -> None:
    assert classify(problem(answer="-1", verifier=verifier), answers, NOTHING_RIGHT[: len(answers)]) == classes


def test_the_most_frequent_answer_wins_however_it_is_written(sample: Any, problem: Any) -> None:
    """Three ways to write a half outvote two identical wrong answers, which would win a vote by text."""
    answers = [("0.4", 0.0), ("1/2", 1.0), ("0.4", 0.0), ("0.5", 1.0), ("\\frac{1}{2}", 1.0)]
    rows = [sample("a", answer, right) for answer, right in answers]
    scores = problem_scores(rows, {"a": problem("a", answer="1/2", verifier="math")})
    assert (scores["cons@k"]["a"], scores["pass@1"]["a"]) == (1.0, 0.6)


def test_wrong_answers_join_forces_too(sample: Any, problem: Any) -> None:
    rows = [sample("a", answer, right) for answer, right in [("3", 1.0), ("x+1", 0.0), ("1+x", 0.0)]]
    classes = votes({"a": rows}, {"a": problem("a", verifier="math")})["a"]  # in a process that can be killed
    assert classes == [0, 1, 1] and consensus(rows, classes, 3) == 0.0


def test_consensus_takes_the_most_frequent_answer(sample: Any) -> None:
    right, wrong, none = sample("a", "3", 1.0), sample("a", "7", 0.0), sample("a", "", 0.0)
    assert consensus([wrong, right, right], [0, 1, 1], 3) == 1.0
    assert consensus([wrong, wrong, right], [0, 0, 2], 3) == 0.0
    assert consensus([wrong, right], [0, 1], 2) == 0.0  # a tie: the answer that came first
    assert consensus([none, none, right], [None, None, 2], 3) == 1.0  # no answer, no vote
    assert consensus([none, none], [None, None], 2) == 0.0


def test_cons_at_k_is_the_mean_over_groups_of_k(sample: Any) -> None:
    right, wrong = sample("a", "3", 1.0), sample("a", "7", 0.0)
    rows, classes = [wrong, right, right, wrong, wrong, right, right], [0, 1, 1, 0, 0, 1, 1]
    assert consensus(rows, classes, 3) == 0.5  # wrong right right | wrong wrong right | the seventh is left over
    assert consensus(rows, classes, 7) == 1.0
    assert consensus(rows, classes, 1) == pytest.approx(4 / 7)  # cons@1 is pass@1


def test_answers_that_break_a_limit_are_told_apart_by_value_and_text(
    sample: Any, problem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.evaluation.votes.TIME_LIMIT_S", 1.0)
    answers = ["9^{9^{9^{9}}}", "0.5", "x", "1/2"]
    rows = [sample("a", answer, 0.0) for answer in answers]
    assert votes({"a": rows}, {"a": problem("a", verifier="math")})["a"] == [0, 1, 2, 1]
