"""Win rate of one checkpoint over another according to a judge, raw and at equal length.

Judges favor longer responses, so a policy can raise its win rate by writing more. The length-controlled rate estimates
the win rate between responses of equal length: a logistic regression of wins on the difference in length, evaluated at
difference 0 (AlpacaEval 2, arXiv 2404.04475, section 3; here without its term for the difficulty of each prompt).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from grpo.data.records import Problem, Sample
from tasks.judges.base import Judge, Pair


class Matchup(NamedTuple):
    """One of our summaries against one of theirs. `win`: 1 if ours is better, 0 if theirs is, 0.5 for a tie or one vote
    each. `longer`: length of ours minus length of theirs, in characters."""

    win: float
    longer: int


def compare(
    ours: Sequence[Sample], theirs: Sequence[Sample], problems: Mapping[str, Problem], judge: Judge
) -> list[Matchup]:
    """Pairs the summaries of each problem in order and judges each pair in both orders. Drops a pair if the judge
    decides neither order."""
    mine, yours = _summaries(ours), _summaries(theirs)
    pairs = [Pair(problems[pid], a, b) for pid in mine for a, b in zip(mine[pid], yours.get(pid, []), strict=False)]
    forward = judge.compare_all(pairs)
    backward = judge.compare_all([Pair(p.problem, p.b, p.a) for p in pairs])
    matchups = []
    for pair, one, other in zip(pairs, forward, backward, strict=True):
        votes = ([one] if one is not None else []) + ([-other] if other is not None else [])
        if votes:
            win = sum(1.0 if v > 0 else 0.5 if v == 0 else 0.0 for v in votes) / len(votes)
            matchups.append(Matchup(win, len(pair.a) - len(pair.b)))
    return matchups


def win_rate(comparisons: Sequence[Matchup]) -> float:
    """Share of comparisons won, in [0, 1]; ties count half. Needs at least one."""
    return sum(c.win for c in comparisons) / len(comparisons)


def length_controlled(comparisons: Sequence[Matchup]) -> float:
    """Estimated win rate at equal length: sigma(b) of P(win) = sigma(a tanh(d / std(d)) + b), where d is the difference
    in length. The fit has a penalty of a^2 / 2, which keeps `a` finite if length decides everything.

    Returns the raw rate if nothing can be fitted, because all outcomes or all differences are the same.
    """
    from sklearn.linear_model import LogisticRegression  # takes a second to import

    wins = np.array([c.win for c in comparisons])
    longer = np.array([c.longer for c in comparisons], dtype=float)
    if wins.min() == wins.max() or longer.std() == 0:
        return float(wins.mean())
    lengths = np.tanh(longer / longer.std())[:, None]
    fit = LogisticRegression(C=1.0).fit(  # a tie counts as half a win and half a loss
        np.concatenate([lengths, lengths]),
        np.repeat([1, 0], len(wins)),
        sample_weight=np.concatenate([wins, 1 - wins]),
    )
    return float(1 / (1 + np.exp(-fit.intercept_[0])))


def _summaries(samples: Sequence[Sample]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for sample in samples:
        groups[sample.problem_id].append(sample.summary)
    return groups
