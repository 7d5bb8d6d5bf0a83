"""Metrics of a checkpoint on a test set."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.data.records import Problem, Sample
from grpo.errors import InputError
from tasks.evaluation.metrics import Scores, mean, problem_scores, with_intervals
from tasks.evaluation.refusals import instruction_metrics
from tasks.problems.constraints import read_constraints, share_satisfied

UNVOTED = {"code", "none"}
"""Verifiers whose answers are free text, of which no two are alike, so a majority vote means nothing."""


def set_scores(
    samples: Sequence[Sample], problems: Mapping[str, Problem], k: int | None
) -> dict[str, dict[str, float]]:
    """pass@1, pass@k and cons@k of each problem, computed as for held-out problems. A response to a prompt with
    constraints is right if it satisfies all of them (IFEval's strict prompt accuracy). No cons@k if answers are
    programs or free text.

    Raises:
        InputError: a prompt has neither a verifier nor constraints, so nothing says what is right.
    """
    scores = problem_scores([_graded(sample, problems[sample.problem_id]) for sample in samples], problems, k)
    if any(problem.verifier in UNVOTED for problem in problems.values()):
        del scores["cons@k"]
    return scores


def set_metrics(
    samples: Sequence[Sample], problems: Mapping[str, Problem], scores: Scores, confidence: float, k: int | None
) -> dict[str, Any]:
    """The closing table's row for a set: `scores` with intervals, form and length of the completions, and the number of
    problems and samples."""
    formats = [sample.rewards["format"] for sample in samples if "format" in sample.rewards]
    return {
        **with_intervals(scores, confidence),
        **instruction_metrics(samples, problems),
        **({"format": mean(formats)} if formats else {}),
        "mean_tokens": mean([sample.tokens for sample in samples]),
        "cut_off": mean([float(sample.finish_reason == "length") for sample in samples]),
        "problems": len(problems),
        "samples": len(samples),
        "k": k or len(samples) // max(1, len(problems)),
    }


def _graded(sample: Sample, problem: Problem) -> Sample:
    if "accuracy" in sample.rewards:
        return sample
    constraints = read_constraints(problem.metadata)
    if not constraints:
        raise InputError(
            f"problem {problem.id} of a test set has neither a verifier nor constraints; give its source a verifier"
        )
    kept = float(share_satisfied(constraints, sample.summary) == 1.0)
    return dataclasses.replace(sample, rewards={**sample.rewards, "accuracy": kept})
