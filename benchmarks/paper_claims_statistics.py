"""Statistics of the study of the papers' claims: intervals, verdicts, power, curves. Plain functions of numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from scipy import stats

Expect = Literal["higher", "at_most"]
Verdict = Literal["holds", "does not hold here", "undecided"]


def paired_interval(differences: Sequence[float], level: float = 0.95, resamples: int = 10_000) -> tuple[float, float]:
    """Bootstrap interval [low, high] of the mean of paired differences, one per seed: the expanded percentile method
    (Hesterberg 2015, arXiv 1411.5279).

    A plain percentile interval is too narrow for few pairs; this one takes percentiles further out, by `tail`. The
    resamples are the same in every call.

    Raises:
        ValueError: fewer than two differences.
    """
    if len(differences) < 2:
        raise ValueError(f"an interval needs two pairs or more, not {len(differences)}")
    values = np.asarray(differences, dtype=float)
    chosen = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    outside = tail(len(values), level)
    low, high = np.quantile(values[chosen].mean(axis=1), [outside, 1 - outside])
    return float(low), float(high)


def tail(n: int, level: float) -> float:
    """Probability that the expanded percentile interval of `n` pairs leaves out at each end.

    The bootstrap's variance is too small by the factor (n - 1) / n, and its intervals are as wide as those of a normal
    distribution instead of Student's t. So the normal quantile z is replaced by sqrt(n / (n - 1)) t. With n = 10 and
    level 0.95 the result is 0.0086 instead of 0.025.
    """
    widened = math.sqrt(n / (n - 1)) * stats.t.ppf((1 + level) / 2, n - 1)
    return float(stats.norm.cdf(-widened))


def verdict(expect: Expect, margin: float, low: float, high: float) -> Verdict:
    """Verdict on one contrast from the interval of higher - lower. `margin`: the smallest difference that matters, in
    the unit of the outcome."""
    if expect == "higher":
        return "holds" if low > 0 else "does not hold here" if high < margin else "undecided"
    return "holds" if high < margin else "does not hold here" if low > margin else "undecided"


def combined(verdicts: Iterable[Verdict]) -> Verdict:
    """Verdict on a claim from those on its contrasts: all must hold, and one that does not hold decides."""
    of_contrasts = set(verdicts)
    if "does not hold here" in of_contrasts:
        return "does not hold here"
    return "holds" if of_contrasts == {"holds"} else "undecided"


def power(n: int, effect: float, sd: float, level: float = 0.95) -> float:
    """Probability that the interval of `n` pairs is above 0 if the differences have mean `effect` and standard
    deviation `sd`: that of the paired t-test, which the interval stands for."""
    critical = stats.t.ppf((1 + level) / 2, n - 1)
    return float(stats.nct.sf(critical, n - 1, effect / sd * math.sqrt(n)))


def detectable(n: int, sd: float, wanted: float = 0.8, level: float = 0.95) -> float:
    """The smallest mean difference that `n` pairs show with probability `wanted`, in the unit of `sd`."""
    low, high = 0.0, 100.0 * sd
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power(n, middle, sd, level) < wanted else (low, middle)
    return high


def cannot_win(scores: Mapping[float, Sequence[float]], seeds: int) -> set[float]:
    """Learning rates that would lose even if they scored 1, and all others 0, on every seed that is missing.
    `scores`: rate -> the scores so far, between 0 and 1, of `seeds` in the end."""
    sums = {rate: math.fsum(known) for rate, known in scores.items()}
    best = max(sums.values(), default=0.0)
    return {rate for rate, known in scores.items() if sums[rate] + seeds - len(known) < best}


def choose_rate(scores: Mapping[float, Sequence[float]]) -> float:
    """The learning rate with the highest mean score over the seeds; of equals the smallest. `scores`: rate -> one score
    per seed.

    Raises:
        ValueError: the rates have different numbers of scores, so that their budgets differ.
    """
    if len({len(values) for values in scores.values()}) != 1:
        raise ValueError(f"rates were tried on different numbers of seeds: { {r: len(s) for r, s in scores.items()} }")
    return min(scores, key=lambda rate: (-math.fsum(scores[rate]) / len(scores[rate]), rate))


def steps_for(tokens: Sequence[float], budget: float) -> int:
    """Number of steps whose sampled tokens come nearest to `budget`. `tokens`: those of each step of a pilot run. Steps
    beyond the pilot's are taken to sample as many as its last."""
    steps, total = 0, 0.0
    for of_step in itertools.chain(tokens, itertools.repeat(tokens[-1])):
        if total + of_step / 2 > budget:
            break
        steps, total = steps + 1, total + of_step
    return max(1, steps)


def area(tokens: Sequence[float], values: Sequence[float], until: float) -> float:
    """Mean of a curve over the first `until` sampled tokens.

    Step i samples `tokens[i]` tokens from the policy before its update, which has the accuracy `values[i]`: the curve
    is constant within a step.
    """
    total, before = 0.0, 0.0
    for of_step, value in zip(tokens, values, strict=True):
        total += value * max(0.0, min(of_step, until - before))
        before += of_step
    return total / min(until, before)


def area_of_points(points: Sequence[tuple[float, float]], until: float) -> float:
    """Mean over the first `until` tokens of the straight lines through points (tokens sampled, value), of which the
    first is at 0 tokens. Beyond the last point the value stays."""
    ends = [tokens for tokens, _ in points]
    values = [value for _, value in points]
    grid = sorted({0.0, until, *(end for end in ends if end < until)})
    heights = np.interp(grid, ends, values)
    return float(np.trapezoid(heights, grid)) / until


def tokens_to(tokens: Sequence[float], values: Sequence[float], level: float) -> float:
    """Tokens sampled up to the end of the first step whose value is at least `level`; all of them if there is none."""
    total = 0.0
    for of_step, value in zip(tokens, values, strict=True):
        total += of_step
        if value >= level:
            break
    return total


def smooth(values: Sequence[float], over: int = 5) -> list[float]:
    """Mean of each value and up to `over` - 1 before it."""
    return [math.fsum(values[max(0, i - over + 1) : i + 1]) / min(i + 1, over) for i in range(len(values))]


def cut(tokens: Sequence[float], until: float) -> int:
    """Number of whole steps within the first `until` tokens, at least 1."""
    totals = itertools.accumulate(tokens)
    return max(1, sum(total <= until for total in totals))


def growth(values: Sequence[float], start: int = 0) -> float:
    """Mean of the last tenth of the steps - mean of as many from the index `start` on; a tenth has one step or more."""
    tenth = max(1, len(values) // 10)
    start = min(start, len(values) - tenth)
    return (math.fsum(values[-tenth:]) - math.fsum(values[start : start + tenth])) / tenth


def saturated(values: Sequence[float], share: float = 0.95) -> int:
    """Index of the first step from which on the mean of five steps is `share` of the mean at the end, or more."""
    means = [math.fsum(values[i : i + 5]) / len(values[i : i + 5]) for i in range(max(1, len(values) - 4))]
    return next(i for i, mean in enumerate(means) if mean >= share * means[-1])
