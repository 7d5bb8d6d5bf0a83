"""Metrics of a checkpoint, computed from its samples (R1, evaluation)."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.data.records import Problem, Sample
from grpo.errors import InputError
from grpo.rewards.text import repeated_ngram_share
from tasks.evaluation.votes import consensus, votes

RESAMPLES = 1000


Scores = Mapping[str, Mapping[str, float]]
"""Metric -> problem -> value, for metrics that are means over problems and so have an interval."""


def problem_scores(
    samples: Sequence[Sample], problems: Mapping[str, Problem], k: int | None = None
) -> dict[str, dict[str, float]]:
    """pass@1, pass@k and cons@k of each problem. Also `stated`, the mean accuracy of results in whatever form they are
    written, if samples were scored by it. `k`: None for all samples of a problem."""
    groups = by_problem(samples)
    classes = votes(groups, problems)
    scores: dict[str, dict[str, float]] = {"pass@1": {}, "pass@k": {}, "cons@k": {}}
    for pid, group in groups.items():
        accuracy = [sample.rewards["accuracy"] for sample in group]
        scores["pass@1"][pid] = mean(accuracy)
        scores["pass@k"][pid] = pass_at_k(len(group), sum(value >= 1.0 for value in accuracy), k or len(group))
        scores["cons@k"][pid] = consensus(group, classes[pid], k or len(group))
        if all("stated" in sample.rewards for sample in group):
            scores.setdefault("stated", {})[pid] = mean([sample.rewards["stated"] for sample in group])
    return scores


def pass_at_k(n: int, right: int, k: int) -> float:
    """1 - C(n - right, k) / C(n, k): unbiased estimate of the probability that at least one of k samples is right
    (arXiv 2107.03374, equation 1), given that `right` of n are."""
    if not 1 <= k <= n:
        raise InputError(f"pass@{k} of {n} samples: k must be between 1 and the number of samples")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def reasoning_metrics(
    samples: Sequence[Sample], scores: Scores, confidence: float, k: int | None = None
) -> dict[str, Any]:
    """pass@1, pass@k and cons@k with their intervals, format rate, language consistency, and mean length in tokens. `k`
    is that of pass@k and cons@k, as in `problem_scores`."""
    return {
        **with_intervals(scores, confidence),
        "format": mean([s.rewards["format"] for s in samples]),
        "language": mean([s.rewards["language"] for s in samples]),
        "mean_tokens": mean([s.tokens for s in samples]),
        "problems": len(scores["pass@1"]),
        "samples": len(samples),
        "k": k or len(samples) // max(1, len(scores["pass@1"])),
    }


def with_intervals(scores: Scores, confidence: float) -> dict[str, Any]:
    """Means over problems with their intervals: "pass@1" -> 0.5 and "pass@1_ci95" -> [0.4, 0.6]."""
    metrics: dict[str, Any] = {}
    for name, values in scores.items():
        metrics[name] = mean([*values.values()])
        metrics[f"{name}_ci95"] = share_interval([*values.values()], confidence)
    return metrics


def alignment_metrics(samples: Sequence[Sample], problems: Mapping[str, Problem], confidence: float) -> dict[str, Any]:
    """Mean scores of the reward models on general prompts. `alignment` is helpful plus safe, the sum that RL uses."""
    totals = {
        pid: mean([s.rewards["helpful"] + s.rewards["safe"] for s in group])
        for pid, group in by_problem(samples).items()
    }
    harmful = [s for s in samples if problems[s.problem_id].metadata.get("harmful")]
    metrics = {
        "helpful": mean([s.rewards["helpful"] for s in samples]),
        "safe": mean([s.rewards["safe"] for s in samples]),
        "alignment": mean(list(totals.values())),
        "alignment_ci95": interval(list(totals.values()), confidence),
    }
    return metrics | ({"safe_on_harmful": mean([s.rewards["safe"] for s in harmful])} if harmful else {})


def answer_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Metrics of the form of answers to general prompts, where reward hacking shows first: format rate, mean length in
    tokens, and the mean share of repeated word 4-grams within an answer."""
    if not samples:
        return {}
    return {
        "general_format": mean([s.rewards["format"] for s in samples]),
        "general_tokens": mean([s.tokens for s in samples]),
        "general_repeated": mean([repeated_ngram_share(s.completion, 4) for s in samples]),
    }


def interval(values: Sequence[float], confidence: float) -> list[float]:
    """Bootstrap interval [low, high] of the mean over problems, since samples of one problem are not independent."""
    if not values:
        return [0.0, 0.0]
    rng = random.Random(0)
    means = sorted(mean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1 - confidence) / 2
    return [means[int(tail * RESAMPLES)], means[min(RESAMPLES - 1, int((1 - tail) * RESAMPLES))]]


def share_interval(values: Sequence[float], confidence: float) -> list[float]:
    """`interval` of values in [0, 1]. Where all of them are 0, or all are 1, resampling finds no other value, and the
    exact binomial interval says what others may be (Clopper and Pearson, 1934)."""
    (only,) = set(values) if len(set(values)) == 1 else (None,)
    if only not in (0.0, 1.0):
        return interval(values, confidence)
    bound = ((1 - confidence) / 2) ** (1 / len(values))
    return [0.0, 1 - bound] if only == 0.0 else [bound, 1.0]


def by_problem(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples grouped by problem id."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.problem_id].append(sample)
    return groups


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; 0 for an empty sequence."""
    return sum(values) / len(values) if values else 0.0
