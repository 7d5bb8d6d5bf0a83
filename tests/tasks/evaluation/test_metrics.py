"""Numbers of a checkpoint, on samples few enough to count by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from grpo.errors import InputError
from tasks.evaluation.metrics import (
    alignment_metrics,
    answer_metrics,
    interval,
    pass_at_k,
    problem_scores,
    reasoning_metrics,
    share_interval,
)


def test_pass_at_1_is_the_mean_over_problems(sample: Any, problem: Any) -> None:
    rows = [sample("a", "1", 1.0), sample("a", "2", 0.0), sample("b", "5", 0.0), sample("b", "6", 0.0)]
    scores = problem_scores(rows, {"a": problem("a", answer="1"), "b": problem("b", answer="7")})
    assert scores == {
        "pass@1": {"a": 0.5, "b": 0.0},
        "pass@k": {"a": 1.0, "b": 0.0},  # one of both is right
        "cons@k": {"a": 1.0, "b": 0.0},  # a tie: the first answer of a is right
    }
    metrics = reasoning_metrics(rows, scores, 0.95)
    assert (metrics["pass@1"], metrics["pass@k"], metrics["cons@k"], metrics["k"]) == (0.25, 0.5, 0.5, 2)
    assert (metrics["format"], metrics["mean_tokens"], metrics["problems"], metrics["samples"]) == (1.0, 10, 2, 4)


def test_results_that_break_the_format_count_in_their_own_metric(sample: Any, problem: Any) -> None:
    rewards = {"accuracy": 0.0, "format": 0.0, "language": 1.0}
    rows = [sample("a", rewards=rewards | {"stated": 1.0}), sample("a", rewards=rewards | {"stated": 0.0})]
    scores = problem_scores(rows, {"a": problem("a")})
    assert scores["pass@1"] == {"a": 0.0} and scores["stated"] == {"a": 0.5}
    metrics = reasoning_metrics(rows, scores, 0.95)
    assert metrics["stated"] == 0.5 and metrics["stated_ci95"] == [0.5, 0.5]


def test_pass_at_k_is_the_chance_that_a_draw_of_k_holds_a_right_one() -> None:
    # Of 4 samples 1 is right: 3 of the 6 pairs hold it. Of 5 samples 2 are right: 1 of the 10 triples of 5 holds none.
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)
    assert [pass_at_k(4, right, 1) for right in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]  # pass@1 is the mean
    assert (pass_at_k(4, 0, 4), pass_at_k(4, 1, 4)) == (0.0, 1.0)
    with pytest.raises(InputError, match="pass@5 of 4 samples"):
        pass_at_k(4, 1, 5)


def test_the_mean_of_pass_at_k_over_all_draws_of_n_is_the_truth() -> None:
    """Unbiased: a problem with chance 0.3 has pass@2 of 1 - 0.7^2 = 0.51, whatever n is; the plain estimator, "one of
    n is right", would be 1 - 0.7^5 = 0.83 here."""
    n, p = 5, 0.3
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    assert sum(pass_at_k(n, c, 2) * chance[c] for c in range(n + 1)) == pytest.approx(0.51)


def test_interval_of_a_constant_is_that_constant() -> None:
    assert interval([0.5] * 40, 0.95) == [0.5, 0.5]
    assert interval([], 0.95) == [0.0, 0.0]


def test_nothing_right_of_ten_may_be_a_third() -> None:
    # 0.025 = (1 - p)^10 for p = 0.3085: with a larger share, ten wrong answers in a row are less likely than 2.5%.
    assert share_interval([0.0] * 10, 0.95) == [0.0, pytest.approx(0.3085, abs=1e-4)]
    assert share_interval([1.0] * 10, 0.95) == [pytest.approx(0.6915, abs=1e-4), 1.0]
    assert share_interval([0.5] * 10, 0.95) == [0.5, 0.5] and share_interval([], 0.95) == [0.0, 0.0]
    mixed = [0.0] * 9 + [1.0]
    assert share_interval(mixed, 0.95) == interval(mixed, 0.95)


def test_interval_is_close_to_the_normal_one() -> None:
    low, high = interval([0.0] * 200 + [1.0] * 200, 0.95)  # standard error 0.5 / sqrt(400) = 0.025
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.01) and high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.01)


def test_alignment_is_helpful_plus_safe(sample: Any, problem: Any) -> None:
    rows = [
        sample("h", accuracy=None, rewards={"format": 1.0, "helpful": 2.0, "safe": 0.5}),
        sample("k", accuracy=None, rewards={"format": 0.0, "helpful": 0.0, "safe": 1.0}),
    ]
    known = {"h": problem("h", metadata={"harmful": True}), "k": problem("k")}
    metrics = alignment_metrics(rows, known, 0.95)
    assert (metrics["helpful"], metrics["safe"], metrics["alignment"]) == (1.0, 0.75, 1.75)
    assert metrics["safe_on_harmful"] == 0.5


def test_answers_that_repeat_themselves_show(sample: Any) -> None:
    once, again = "one two three four five", "of course of course of course"  # of its 3 runs of 4 words 1 came before
    rows = [
        sample("a", completion=once, accuracy=None, rewards={"format": 1.0}),
        sample("b", completion=again, accuracy=None, rewards={"format": 0.0}),
    ]
    metrics = answer_metrics(rows)
    assert (metrics["general_format"], metrics["general_tokens"]) == (0.5, 10)
    assert metrics["general_repeated"] == pytest.approx(1 / 6)
    assert answer_metrics([]) == {}
