"""Numbers of a checkpoint, on samples few enough to count by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.evaluation.metrics import alignment_metrics, answer_metrics, consensus, interval, reasoning_metrics


def test_pass_at_1_is_the_mean_over_problems(sample: Any) -> None:
    rows = [sample("a", "1", 1.0), sample("a", "2", 0.0), sample("b", "5", 0.0), sample("b", "6", 0.0)]
    metrics = reasoning_metrics(rows, 0.95)
    assert metrics["pass@1"] == 0.25  # (1/2 + 0) / 2
    assert (metrics["format"], metrics["mean_tokens"], metrics["problems"], metrics["samples"]) == (1.0, 10, 2, 4)


def test_consensus_takes_the_most_frequent_answer(sample: Any) -> None:
    assert consensus([sample("a", "7", 0.0), sample("a", "3", 1.0), sample("a", "3", 1.0)]) == 1.0
    assert consensus([sample("a", "7", 0.0), sample("a", "7", 0.0), sample("a", "3", 1.0)]) == 0.0
    assert consensus([sample("a", "7", 0.0), sample("a", "3", 1.0)]) == 0.0  # a tie: the first


def test_interval_of_a_constant_is_that_constant() -> None:
    assert interval([0.5] * 40, 0.95) == [0.5, 0.5]
    assert interval([], 0.95) == [0.0, 0.0]


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
