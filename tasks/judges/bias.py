"""Position and length bias of a judge, measured on its own comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """All votes on two responses a and b to one prompt."""

    first: list[float]  # votes with a shown first; above 0 if a is better
    second: list[float]  # votes with b shown first; also above 0 if a is better
    longer: int  # words of a minus words of b
    kept: bool  # whether it became a training pair

    @property
    def verdict(self) -> float:
        """Mean of all votes: from -2 (b much better) to 2."""
        return sum(self.first + self.second) / len(self.first + self.second)


def bias(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Bias metrics by name. Metrics without data are left out.

    - first_wins: share of decided votes for the response shown first; 0.5 if position does not matter.
    - orders_agree: for pairs shown in both orders, the share of combinations of two votes, one per order, that name the
      same winner or are both ties; mean over pairs.
    - length_correlation: Pearson correlation between the mean verdict on a pair and its difference in words. Each pair
      is counted in both directions, so that it does not matter which response is called a; both means are then 0.
    - longer_wins: share of pairs with a winner in which the longer response won. Pairs of equal length do not count.
    - longer_wins_kept: the same, for the pairs that are trained on.
    """
    votes = [v for c in comparisons for v in (*c.first, *(-v for v in c.second)) if v]
    agreeing = [_agreement(c) for c in comparisons if c.first and c.second]
    signs = [(_sign(c.verdict) * _sign(c.longer), c.kept) for c in comparisons if c.verdict and c.longer]
    products = sum(c.verdict * c.longer for c in comparisons)
    scale = math.sqrt(sum(c.verdict**2 for c in comparisons) * sum(c.longer**2 for c in comparisons))
    shares: dict[str, list[float]] = {
        "first_wins": [v > 0 for v in votes],
        "orders_agree": agreeing,
        "longer_wins": [sign > 0 for sign, _ in signs],
        "longer_wins_kept": [sign > 0 for sign, kept in signs if kept],
    }
    measured = {name: sum(values) / len(values) for name, values in shares.items() if values}
    return measured | ({"length_correlation": products / scale} if scale else {})


def _agreement(comparison: Comparison) -> float:
    couples = [_sign(a) == _sign(b) for a in comparison.first for b in comparison.second]
    return sum(couples) / len(couples)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
