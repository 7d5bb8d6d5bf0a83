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
    saturated,
    smooth,
    tokens_to,
    verdict,
)

Record = Mapping[str, Any]
WORST: Mapping[OutcomeName, float] = dict.fromkeys(("auc", "auc_of_checkpoints", "pass@1", "cons@k", "pass@k"), 0.0)
"""Outcomes of a run that diverged, where it has any: shares of right answers are 0."""
AS_IT_IS: Mapping[OutcomeName, float] = {"length_growth": 1.0, "peak_mb": 1.0}
"""Outcomes that are no shares, in tokens and in MB. All others are shown in points: times 100."""


@dataclass(frozen=True)
class Comparison:
    """A contrast over the seeds: mean, interval and verdict. `seeds`: those on which both arms have the outcome.
    `diverged`: those on which an arm, or a checkpoint that the outcome needs, diverged, so that there is none."""

    contrast: Contrast
    seeds: tuple[int, ...]
    diverged: tuple[int, ...]
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

    def checkpoints(self, arm: str, seed: int) -> list[Record | None]:
        """Of the runs of an arm that end earlier than its whole run."""
        return [self.records.get(run) for run in checkpoint_runs(self.design, arm, self.choices[arm], seed)]

    def result(self, claim: PaperClaim) -> Result:
        comparisons = tuple(map(self.compare, claim.contrasts))
        verdicts = [comparison.verdict for comparison in comparisons if comparison.contrast.decides]
        decided = [of_contrast for of_contrast in verdicts if of_contrast is not None]
        return Result(claim, comparisons, combined(decided) if len(decided) == len(verdicts) else None)

    def compare(self, contrast: Contrast) -> Comparison:
        """A verdict needs every seed of the design: it is undecided if an arm diverged and has no outcome."""
        planned, decision = self.design.seeds.seeds(), self.design.decision
        pairs = {seed: pair for seed in planned if (pair := self.difference(contrast, seed)) is not None}
        differences = tuple(pairs.values())
        interval = paired_interval(differences, decision.level, decision.resamples) if len(pairs) > 1 else None
        lost = tuple(seed for seed in planned if seed not in pairs and self.diverged(contrast, seed))
        decided: Verdict | None = None
        if len(pairs) + len(lost) == len(planned):
            decided = verdict(contrast.expect, contrast.margin, *interval) if interval and not lost else "undecided"
        return Comparison(contrast, tuple(pairs), lost, differences, interval, decided)

    def diverged(self, contrast: Contrast, seed: int) -> bool:
        """Whether both arms were run and one of them diverged, or a checkpoint's run where the outcome needs it."""
        records = [self.record(arm, seed) for arm in contrast.arms]
        if not all(records):
            return False
        if contrast.outcome == "auc_of_checkpoints":
            records += [record for arm in contrast.arms for record in self.checkpoints(arm, seed)]
        return any("diverged" in record for record in records if record is not None)

    def difference(self, contrast: Contrast, seed: int) -> float | None:
        """higher - lower on a seed; None while a run is missing, and if one diverged that has no worst outcome.

        Where a difference is to stay small, a run that diverged would make it small: it has no outcome there either.
        """
        found = [self.record(arm, seed) for arm in contrast.arms]
        records = [record for record in found if record is not None]
        if len(records) != len(found):
            return None
        went_well = [arm for arm, record in zip(contrast.arms, records, strict=True) if "diverged" not in record]
        if len(went_well) < len(records) and (contrast.outcome not in WORST or contrast.expect == "at_most"):
            return None
        if contrast.outcome == "auc_of_checkpoints":
            curves = [points for arm in went_well if (points := self.points(arm, seed)) is not None]
            if len(curves) != len(went_well):
                return None
            until = min((points[-1][0] for points in curves), default=0.0)
            found_values = [area_of_points(points, until) for points in curves]
        else:
            found_values = outcomes(contrast.outcome, [r for r in records if "diverged" not in r])
        values = dict(zip(went_well, found_values, strict=True))
        higher, *lower = [values.get(arm, WORST.get(contrast.outcome, 0.0)) for arm in contrast.arms]
        return higher - sum(lower)

    def points(self, arm: str, seed: int) -> list[tuple[float, float]] | None:
        """(tokens sampled, held-out pass@1): of Dev1, of the runs that end earlier, and of the whole run."""
        start, rest = self.record("dev1", seed), [*self.checkpoints(arm, seed), self.record(arm, seed)]
        if start is None or any(record is None or "diverged" in record for record in rest):
            return None
        later = [(sum(r["curve"]["tokens"]), r["table"]["pass@1"]) for r in rest if r is not None]
        return [(0.0, start["table"]["pass@1"]), *later]


def outcomes(name: OutcomeName, records: Sequence[Record]) -> list[float]:
    """An outcome of arms on the same seed. Curves are compared up to where the one with the fewest tokens ends."""
    if name == "peak_mb":
        return [record["peak_mb"] for record in records]
    if name == "length_growth":
        curves = [record["curve"] for record in records]
        return [growth(curve["length"], saturated(curve["format"])) for curve in curves]
    if name in ("auc", "tokens_to_accuracy"):
        tokens = [record["curve"]["tokens"] for record in records]
        accuracy = [record["curve"]["accuracy"] for record in records]
        until = min(map(sum, tokens), default=0)
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
