"""Bias of a judge: every measure on votes that can be counted by hand."""

from __future__ import annotations

import math

import pytest

from tasks.judges.bias import Comparison, bias


def test_first_place_and_length_by_hand() -> None:
    # Shown first won: 2 and 1 of the first, -(-1) of the second; lost: 1 of the second. The tie of the third is left
    # out.
    found = bias(
        [
            Comparison(first=[2.0, 1.0], second=[1.0, -1.0], longer=3, kept=True),
            Comparison(first=[-2.0], second=[-2.0], longer=-1, kept=True),
            Comparison(first=[0.0], second=[], longer=5, kept=False),
            Comparison(first=[-1.0], second=[-1.0], longer=2, kept=False),
        ]
    )
    # Decided votes for what was shown first: +2 +1 -1 +1 | -2 +2 | -1 +1: five of eight above 0.
    assert found["first_wins"] == 5 / 8
    # Couples of the first pair: (2, 1) (2, -1) (1, 1) (1, -1): half agree. The others agree, the third has one order.
    assert found["orders_agree"] == pytest.approx((0.5 + 1 + 1) / 3)
    # Verdicts 0.75, -2, 0, -1; longer 3, -1, 5, 2: the longer one won the first and the second, not the fourth.
    assert found["longer_wins"] == pytest.approx(2 / 3)
    assert found["longer_wins_kept"] == 1.0
    assert found["length_correlation"] == pytest.approx((2.25 + 2 - 2) / math.sqrt((0.5625 + 4 + 1) * (9 + 1 + 25 + 4)))


def test_it_does_not_matter_which_response_is_called_a() -> None:
    one = Comparison(first=[2.0, 1.0], second=[-1.0], longer=3, kept=True)
    same = Comparison(first=[1.0], second=[-2.0, -1.0], longer=-3, kept=True)
    other = Comparison(first=[-1.0], second=[0.0], longer=2, kept=False)
    assert bias([one, other]) == pytest.approx(bias([same, other]))


def test_what_was_not_seen_is_not_measured() -> None:
    assert bias([]) == {}
    assert bias([Comparison(first=[0.0], second=[], longer=2, kept=False)]) == {}
