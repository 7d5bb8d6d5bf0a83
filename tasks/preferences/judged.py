"""Preference data from a judge: pairs for the helpful reward model, labels for the safety model (R1 v2, stage 4)."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo.data.records import Problem, Sample
from tasks.judges.base import Judge, Pair, Response
from tasks.judges.bias import Comparison, bias
from tasks.preferences.rows import label_row, pair_row

JUDGE = "judge"
"""Value of `source` in these rows."""


class Judged(NamedTuple):
    """Preference pairs from a judge, counts, and the judge's bias."""

    rows: list[dict[str, Any]]
    counts: dict[str, int]
    bias: dict[str, float]  # see tasks/judges/bias.py


def pairs(
    samples: Sequence[Sample],
    problems: Mapping[str, Problem],
    judge: Judge,
    *,
    judgments: int,
    margin: float,
    length_ratio_max: float,
    held_out_share: float,
    seed: int,
) -> Judged:
    """Pairs of summaries, counts of pairs by outcome, and the judge's bias. Only summaries are compared.

    Each pair of a prompt's distinct summaries is judged `judgments` times in random order. The mean difference, from -2
    to 2, must exceed `margin`. A pair with an undecided judgment is dropped, because its mean would rest on fewer
    votes.
    """
    by_prompt: dict[str, list[str]] = defaultdict(list)
    for sample in samples:
        if sample.summary and sample.summary not in by_prompt[sample.problem_id]:
            by_prompt[sample.problem_id].append(sample.summary)
    rng = random.Random(f"preferences/{seed}")
    candidates = [(pid, a, b) for pid, texts in by_prompt.items() for a, b in itertools.combinations(texts, 2)]
    fitting = [c for c in candidates if _length_ratio(c[1], c[2]) <= length_ratio_max]
    swaps = [[rng.random() < 0.5 for _ in range(judgments)] for _ in fitting]
    requests = [
        Pair(problems[pid], *((b, a) if swapped else (a, b)))
        for (pid, a, b), orders in zip(fitting, swaps, strict=True)
        for swapped in orders
    ]
    verdicts = iter(judge.compare_all(requests))
    rows = []
    compared: list[Comparison] = []
    counts: Counter[str] = Counter({"candidates": len(candidates), "length": len(candidates) - len(fitting)})
    for (pid, a, b), orders in zip(fitting, swaps, strict=True):
        votes = [next(verdicts) for _ in orders]
        if None in votes:
            counts["undecided"] += 1
            continue
        decided = _compared(votes, orders, _words(a) - _words(b), margin)
        compared.append(decided)
        if not decided.kept:
            counts["tied"] += 1
            continue
        chosen, rejected = (a, b) if decided.verdict > 0 else (b, a)
        rows.append(pair_row(problems[pid].messages, chosen, rejected, abs(decided.verdict), JUDGE, held_out_share))
    counts["kept"] = len(rows)
    return Judged(rows, dict(counts), bias(compared))


def labels(
    samples: Sequence[Sample], problems: Mapping[str, Problem], judge: Judge, held_out_share: float
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Returns (rows, counts). A label covers the whole response: 1 safe, 0 unsafe."""
    verdicts = judge.safe_all([Response(problems[s.problem_id], s.completion) for s in samples])
    rows = [
        label_row(problems[sample.problem_id].messages, sample.completion, verdict, JUDGE, held_out_share)
        for sample, verdict in zip(samples, verdicts, strict=True)
        if verdict is not None
    ]
    safe = sum(row["label"] for row in rows)
    return rows, {"safe": safe, "unsafe": len(rows) - safe, "undecided": len(samples) - len(rows)}


def _compared(votes: Sequence[float | None], orders: Sequence[bool], longer: int, margin: float) -> Comparison:
    """Aggregates votes, which are above 0 if the response shown first is better. `orders`: whether b was shown
    first."""
    of_a = [(-v if swapped else v, swapped) for v, swapped in zip(votes, orders, strict=True) if v is not None]
    first, second = ([v for v, swapped in of_a if swapped == order] for order in (False, True))
    return Comparison(first, second, longer, abs(sum(v for v, _ in of_a)) / len(of_a) > margin)


def _length_ratio(a: str, b: str) -> float:
    shorter, longer = sorted((_words(a), _words(b)))
    return longer / max(1, shorter)


def _words(text: str) -> int:
    return len(text.split())
