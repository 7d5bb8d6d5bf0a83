"""Metrics of a checkpoint from its samples (R1, evaluation)."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.data.records import Problem, Sample
from grpo.rewards.text import repeated_ngram_share

RESAMPLES = 1000


def reasoning_metrics(samples: Sequence[Sample], confidence: float) -> dict[str, Any]:
    """pass@1 with its interval, cons@k, format rate, language consistency, mean length in tokens."""
    groups = by_problem(samples)
    per_problem = [mean([s.rewards["accuracy"] for s in group]) for group in groups.values()]
    return {
        "pass@1": mean(per_problem),
        "pass@1_ci95": interval(per_problem, confidence),
        "cons@k": mean([consensus(group) for group in groups.values()]),
        "format": mean([s.rewards["format"] for s in samples]),
        "language": mean([s.rewards["language"] for s in samples]),
        "mean_tokens": mean([s.tokens for s in samples]),
        "problems": len(groups),
        "samples": len(samples),
    }


def consensus(group: Sequence[Sample]) -> float:
    """Reward of the most frequent answer to a problem; cons@k is its mean over problems. Samples without an answer do
    not vote; in a tie the answer that came first wins."""
    votes = Counter(s.answer for s in group if s.answer)
    if not votes:
        return 0.0
    winner = votes.most_common(1)[0][0]
    return next(s.rewards["accuracy"] for s in group if s.answer == winner)


def alignment_metrics(samples: Sequence[Sample], problems: Mapping[str, Problem], confidence: float) -> dict[str, Any]:
    """Mean scores of the reward models on general prompts. `alignment` is helpful plus safe, as RL sums them."""
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
    tokens, mean share of repeated 4-grams of words within an answer."""
    if not samples:
        return {}
    return {
        "general_format": mean([s.rewards["format"] for s in samples]),
        "general_tokens": mean([s.tokens for s in samples]),
        "general_repeated": mean([repeated_ngram_share(s.completion, 4) for s in samples]),
    }


def interval(values: Sequence[float], confidence: float) -> list[float]:
    """Bootstrap interval [low, high] of the mean over problems: samples of one problem are not independent."""
    if not values:
        return [0.0, 0.0]
    rng = random.Random(0)
    means = sorted(mean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1 - confidence) / 2
    return [means[int(tail * RESAMPLES)], means[min(RESAMPLES - 1, int((1 - tail) * RESAMPLES))]]


def by_problem(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples by the id of their problem."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.problem_id].append(sample)
    return groups


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0
