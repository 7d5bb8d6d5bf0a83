"""Outcomes of the arms and what they say of each claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paper_claims_design import Choice, Contrast, Design, OutcomeName, PaperClaim, Run
from paper_claims_plan import Records, checkpoint_runs
from paper_claims_statistics import (
    Verdict,
    area,
    area_of_points,
    combined,
    cut,
    growth,
    paired_interval,
    smooth,
    tokens_to,
    verdict,
)

Record = Mapping[str, Any]
AS_IT_IS: Mapping[OutcomeName, float] = {"length_growth": 1.0, "peak_mb": 1.0}
"""Outcomes that are no shares, in tokens and in MB. All others are shown in points: times 100."""


@dataclass(frozen=True)
class Comparison:
    """A contrast over the seeds: mean, interval and verdict. `seeds`: those that both arms were run on."""

    contrast: Contrast
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    interval: tuple[float, float] | None
    verdict: Verdict | None

    @property
    def mean(self) -> float:
        return sum(self.differences) / len(self.differences)


@dataclass(frozen=True)
class Result:
    """A claim, its comparisons, and the verdict; None until all seeds of the design were run."""

    claim: PaperClaim
    comparisons: tuple[Comparison, ...]
    verdict: Verdict | None


class Study:
    """The records of the main runs, by arm and seed."""

    def __init__(self, design: Design, choices: Mapping[str, Choice], records: Records):
        self.design, self.choices, self.records = design, choices, records

    def record(self, arm: str, seed: int) -> Record | None:
        choice = self.choices.get(arm)
        return None if choice is None else self.records.get(Run(arm, seed, choice.rate, choice.steps))

    def result(self, claim: PaperClaim) -> Result:
        comparisons = tuple(map(self.compare, claim.contrasts))
        verdicts = [comparison.verdict for comparison in comparisons if comparison.contrast.decides]
        decided = [of_contrast for of_contrast in verdicts if of_contrast is not None]
        return Result(claim, comparisons, combined(decided) if len(decided) == len(verdicts) else None)

    def compare(self, contrast: Contrast) -> Comparison:
        """A verdict needs a difference on every seed of the design."""
        planned, decision = self.design.seeds.seeds(), self.design.decision
        pairs = {seed: pair for seed in planned if (pair := self.difference(contrast, seed)) is not None}
        differences = tuple(pairs.values())
        interval = paired_interval(differences, decision.level, decision.resamples) if len(pairs) > 1 else None
        whole = interval is not None and len(pairs) == len(planned)
        decided = verdict(contrast.expect, contrast.margin, *interval) if whole and interval else None
        return Comparison(contrast, tuple(pairs), differences, interval, decided)

    def difference(self, contrast: Contrast, seed: int) -> float | None:
        """higher - lower on a seed; None while a run is missing, or its memory is not known."""
        found = [self.record(arm, seed) for arm in contrast.arms]
        records = [record for record in found if record is not None]
        if len(records) != len(found):
            return None
        if contrast.outcome == "auc_of_checkpoints":
            curves = [self.points(arm, seed) for arm in contrast.arms]
            known = [points for points in curves if points is not None]
            if len(known) != len(curves):
                return None
            until = min(points[-1][0] for points in known)
            values: list[float | None] = [area_of_points(points, until) for points in known]
        else:
            values = outcomes(contrast.outcome, records)
        if any(value is None for value in values):
            return None
        higher, lower = values[0], values[1] if len(values) > 1 else 0.0
        assert higher is not None and lower is not None
        return higher - lower

    def points(self, arm: str, seed: int) -> list[tuple[float, float]] | None:
        """(tokens sampled, held-out pass@1): of Dev1, of the runs that end earlier, and of the whole run."""
        choice = self.choices[arm]
        runs = [*checkpoint_runs(self.design, arm, choice, seed), Run(arm, seed, choice.rate, choice.steps)]
        start, rest = self.record("dev1", seed), [self.records.get(run) for run in runs]
        if start is None or any(record is None for record in rest):
            return None
        later = [(sum(r["curve"]["tokens"]), r["table"]["pass@1"]) for r in rest if r is not None]
        return [(0.0, start["table"]["pass@1"]), *later]


def outcomes(name: OutcomeName, records: Sequence[Record]) -> list[float | None]:
    """An outcome of arms on the same seed. Curves are compared up to where the one with the fewest tokens ends."""
    if name == "peak_mb":
        return [record["peak_mb"] for record in records]
    if name == "length_growth":
        return [growth(record["curve"]["length"]) for record in records]
    if name in ("auc", "tokens_to_accuracy"):
        tokens = [record["curve"]["tokens"] for record in records]
        accuracy = [record["curve"]["accuracy"] for record in records]
        until = min(map(sum, tokens))
        if name == "auc":
            return [area(of, values, until) for of, values in zip(tokens, accuracy, strict=True)]
        ends = [cut(of, until) for of in tokens]
        smoothed = [smooth(values)[:end] for values, end in zip(accuracy, ends, strict=True)]
        level = min(values[-1] for values in smoothed)
        return [
            tokens_to(of[: len(values)], values, level) / until for of, values in zip(tokens, smoothed, strict=True)
        ]
    return [record["table"][name] for record in records]


def scale(name: OutcomeName) -> float:
    """Factor from the outcome to the number that is shown."""
    return AS_IT_IS.get(name, 100.0)
