"""Rejection sampling: which of a policy's samples become training data (R1, stage 3a).

Rules first, then the judge for what rules let pass, then at most so many a prompt. Every sample keeps its reason.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from grpo.data import Problem, Sample
from tasks.filters import FilterSettings, reject
from tasks.judge import Claim, Judge, Response

KEPT = "kept"


def select(
    samples: Sequence[Sample],
    problems: Mapping[str, Problem],
    settings: FilterSettings,
    judge: Judge,
    judged: Collection[str],
    keep_per_problem: int,
) -> list[Sample]:
    """The same samples with `verdict` ("kept" or "dropped") and `reason` filled in."""
    reasons: list[str] = [reject(sample, settings) or "" for sample in samples]
    for domain, ask in (("reasoning", _incorrect), ("general", _harmful)):
        if domain not in judged:
            continue
        asked = [i for i, sample in enumerate(samples) if not reasons[i] and sample.domain == domain]
        for i, reason in zip(asked, ask(judge, [samples[i] for i in asked], problems), strict=True):
            reasons[i] = reason
    taken: Counter[str] = Counter()
    seen: set[tuple[str, str]] = set()
    selected = []
    for sample, reason in zip(samples, reasons, strict=True):
        if not reason and (sample.problem_id, sample.completion) in seen:
            reason = "duplicate"
        if not reason and taken[sample.problem_id] == keep_per_problem:
            reason = "surplus"
        if not reason:
            taken[sample.problem_id] += 1
            seen.add((sample.problem_id, sample.completion))
        selected.append(dataclasses.replace(sample, verdict="dropped" if reason else KEPT, reason=reason))
    return selected


def _incorrect(judge: Judge, samples: Sequence[Sample], problems: Mapping[str, Problem]) -> list[str]:
    claims = [Claim(problems[s.problem_id].text, problems[s.problem_id].answer, s.answer) for s in samples]
    # Undecided is never kept: nobody has said that it is right.
    return ["" if verdict == "correct" else f"judged_{verdict}" for verdict in judge.correct_all(claims)]


def _harmful(judge: Judge, samples: Sequence[Sample], problems: Mapping[str, Problem]) -> list[str]:
    responses = [Response(problems[s.problem_id], s.completion) for s in samples]
    names = {True: "", False: "judged_unsafe", None: "judged_undecided"}
    return [names[verdict] for verdict in judge.safe_all(responses)]


def funnel(samples: Sequence[Sample]) -> dict[str, int]:
    """Counts that add up: sampled = kept + every reason."""
    counts = Counter(sample.reason or KEPT for sample in samples)
    return {"sampled": len(samples), **dict(sorted(counts.items()))}
