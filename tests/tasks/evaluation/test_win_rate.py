"""Win rates on comparisons few enough to count by hand."""

from __future__ import annotations

from typing import Any

import pytest

from grpo.config.judge import JudgeSettings
from tasks.evaluation.win_rate import Matchup, compare, length_controlled, win_rate
from tasks.judges.create_judge import make_judge


def test_wins_ties_and_lengths(sample: Any, problem: Any) -> None:
    known = {pid: problem(pid, domain="general", metadata={"mentions": ["river"]}) for pid in "ab"}
    ours = [sample("a", "the river", None), sample("b", "no", None)]
    theirs = [sample("a", "no", None), sample("b", "nothing", None)]
    judge = make_judge(JudgeSettings())
    assert compare(ours, theirs, known, judge) == [Matchup(1.0, 9 - 2), Matchup(0.5, 2 - 7)]
    assert win_rate(compare(ours, theirs, known, judge)) == 0.75
    assert win_rate(compare(theirs, ours, known, judge)) == 0.25
    assert compare([], theirs, known, judge) == []


def test_a_judge_that_likes_length_alone_finds_nobody_better_at_equal_length() -> None:
    # Longer: 8 of 10 won, shorter: 2 of 10, and ours are longer in 40 of 50: raw (32 + 2) / 50.
    comparisons = [Matchup(1.0, 20)] * 32 + [Matchup(0.0, 20)] * 8
    comparisons += [Matchup(1.0, -20)] * 2 + [Matchup(0.0, -20)] * 8
    assert win_rate(comparisons) == 0.68
    assert length_controlled(comparisons) == pytest.approx(0.5, abs=0.06)
    assert length_controlled(comparisons * 100) == pytest.approx(0.5, abs=0.001)  # the penalty weighs less


def test_length_that_decides_nothing_changes_nothing() -> None:
    # 3 of 4 won whether longer or shorter.
    comparisons = [Matchup(win, longer) for longer in (-5, 5) for win in (1.0, 1.0, 1.0, 0.0)]
    assert length_controlled(comparisons) == pytest.approx(win_rate(comparisons), abs=1e-3) == pytest.approx(0.75)


def test_a_tie_is_half_a_win_and_half_a_loss() -> None:
    ties = [Matchup(0.5, 3), Matchup(0.5, -3), Matchup(1.0, 3), Matchup(0.0, -3)]
    halves = [*ties[2:], *ties[2:], *(Matchup(win, longer) for win in (0.0, 1.0) for longer in (3, -3))]
    assert length_controlled(ties * 2) == pytest.approx(length_controlled(halves), abs=1e-6)


def test_where_length_decides_everything_the_rate_is_finite_and_even() -> None:
    comparisons = [Matchup(float(longer > 0), longer) for longer in (-9, -4, 4, 9)]
    assert length_controlled(comparisons) == pytest.approx(0.5, abs=1e-3)


def test_one_outcome_or_one_difference_leaves_the_raw_rate() -> None:
    assert length_controlled([Matchup(1.0, 3), Matchup(1.0, -8)]) == 1.0
    assert length_controlled([Matchup(0.0, 3)]) == 0.0
    assert length_controlled([Matchup(1.0, 5), Matchup(0.0, 5), Matchup(0.5, 5)]) == 0.5
