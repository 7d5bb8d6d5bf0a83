"""Rewards: plain functions that score one completion; weighting is kept apart from scoring."""

from __future__ import annotations

from collections.abc import Callable

from grpo.config import RewardWeights
from grpo.data import Problem
from grpo.language import language_consistency
from grpo.template import Parts
from grpo.verifiers import verify


def accuracy(problem: Problem, parts: Parts) -> float:
    """The verifier's verdict on the answer, 0..1; no answer block, no reward."""
    return verify(problem, parts.answer)


def format_(problem: Problem, parts: Parts) -> float:
    """1 if reasoning and answer are tagged as asked, else 0. The paper does not publish its scale."""
    return float(parts.well_formed)


def language(problem: Problem, parts: Parts) -> float:
    """Share of the reasoning's words in the problem's language; no reasoning, no reward."""
    return language_consistency(parts.reasoning, problem.language) if parts.reasoning else 0.0


REASONING: dict[str, Callable[[Problem, Parts], float]] = {
    "accuracy": accuracy,
    "format": format_,
    "language": language,
}
GENERAL: dict[str, Callable[[Problem, Parts], float]] = {"format": format_, "language": language}
"""Which rules a domain is scored by (R1, stage 4): a sample uses only its own branch."""

BRANCHES = {"reasoning": REASONING, "general": GENERAL}


def rule_rewards(problem: Problem, parts: Parts) -> dict[str, float]:
    """The breakdown of the rule rewards of one completion, unweighted."""
    return {name: rule(problem, parts) for name, rule in BRANCHES[problem.domain].items()}


def total(breakdown: dict[str, float], weights: RewardWeights) -> float:
    """Weighted sum of a breakdown."""
    return sum(getattr(weights, name) * value for name, value in breakdown.items())
