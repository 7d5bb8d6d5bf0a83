"""Compares two or more recipe runs: configurations, stages, and checkpoints with intervals for their differences."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo.data.records import Sample, read_samples
from tasks.evaluation.metrics import RESAMPLES, Scores, by_problem, interval, mean
from tasks.evaluation.records import INTERVAL, SAMPLES, read_scores
from tasks.report.tables import COLUMNS
from tasks.store.diff import Ingredients, Keys, changed_leaves, differences, dotted, shorten
from tasks.store.manifest import Manifest
from tasks.tracking.recipe_run import RecipeRun
from tasks.tracking.tags import DIGEST_TAG, KEY_TAG

_NOT_COMPARED = {"name", "description"}
_REASONING = ("format", "language")


@dataclass(frozen=True)
class MeanDifference:
    """Difference of two means over problems, new minus old, with a bootstrap interval [low, high]. `paired`: both sides
    have the same problems, so each problem's difference is resampled. Otherwise each side is resampled separately,
    which gives a wider interval."""

    value: float
    low: float
    high: float
    paired: bool
    problems: tuple[int, int]


def mean_difference(old: Mapping[str, float], new: Mapping[str, float], confidence: float) -> MeanDifference:
    """The difference between two means over problems."""
    sizes = (len(old), len(new))
    value = mean(list(new.values())) - mean(list(old.values()))
    if old.keys() == new.keys():
        low, high = interval([new[name] - old[name] for name in old], confidence)
        return MeanDifference(value, low, high, True, sizes)
    low, high = _unpaired(list(old.values()), list(new.values()), confidence)
    return MeanDifference(value, low, high, False, sizes)


def _unpaired(old: Sequence[float], new: Sequence[float], confidence: float) -> tuple[float, float]:
    rng = random.Random(0)
    resampled = sorted(
        mean(rng.choices(new, k=len(new))) - mean(rng.choices(old, k=len(old))) for _ in range(RESAMPLES)
    )
    tail = (1 - confidence) / 2
    return resampled[int(tail * RESAMPLES)], resampled[min(RESAMPLES - 1, int((1 - tail) * RESAMPLES))]


def by_metric(samples: Sequence[Sample], scores: Scores | None = None) -> dict[str, Mapping[str, float]]:
    """Metric of the closing table -> problem -> value, for metrics that are means over problems.

    `scores`: what the evaluation stored (`SCORES`). An evaluation by an earlier version stored nothing; then cons@k, a
    vote by the problems' verifiers, is not among the metrics.
    """
    reasoning = by_problem([s for s in samples if s.domain == "reasoning"])
    general = by_problem([s for s in samples if s.domain == "general" and {"helpful", "safe"} <= s.rewards.keys()])
    metrics: dict[str, Mapping[str, float]] = {
        "pass@1": {p: mean([s.rewards["accuracy"] for s in group]) for p, group in reasoning.items()},
        **{name: {p: mean([s.rewards[name] for s in g]) for p, g in reasoning.items()} for name in _REASONING},
        "mean_tokens": {p: mean([s.tokens for s in group]) for p, group in reasoning.items()},
        "alignment": {p: mean([s.rewards["helpful"] + s.rewards["safe"] for s in g]) for p, g in general.items()},
        **(scores or {}),
    }
    return {name: values for name, values in metrics.items() if values}


def fields(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """{"field": dotted path, "values": one per configuration} for each field that is not the same in all of them."""
    first, *others = configs
    paths = {path: None for other in others for path, _, _ in changed_leaves(dict(first), dict(other))}
    return [
        {"field": dotted(path), "values": [_at(config, path) for config in configs]}
        for path in sorted(paths, key=dotted)
        if dotted(path) not in _NOT_COMPARED
    ]


def _at(config: Any, path: Keys) -> Any:
    for part in path:
        if isinstance(config, list):
            config = config[part] if isinstance(part, int) and part < len(config) else None
        else:
            config = config.get(part) if isinstance(config, Mapping) else None
    return config


def stages(runs: Sequence[RecipeRun]) -> list[dict[str, Any]]:
    """Every stage of any run: its keys and times, whether all runs have the same artifact, and if not, why, relative to
    the first run that has it. Attempts at one key are different artifacts, unless they made the same."""
    names = dict.fromkeys(stage.name for run in runs for stage in run.stages)
    rows = []
    for name in names:
        of_runs = [run.stage(name) for run in runs]
        keys = [stage.run.tags.get(KEY_TAG) if stage else None for stage in of_runs]
        digests = [stage.run.tags.get(DIGEST_TAG) if stage else None for stage in of_runs]
        manifests = [run.manifests.get(name) for run in runs]
        first = next((manifest for manifest in manifests if manifest), None)
        rows.append(
            {
                "stage": name,
                "shared": None not in digests and len(set(digests)) == 1,
                "keys": keys,
                "seconds": [stage.seconds if stage else None for stage in of_runs],
                "status": [stage.status if stage else None for stage in of_runs],
                "why": [why(first, m) if first and m and m.digest != first.digest else [] for m in manifests],
            }
        )
    return rows


def why(old: Manifest, new: Manifest) -> list[str]:
    """Why two artifacts of a stage differ, one reason per line: fields, inputs by name, version."""
    if old.key == new.key:
        return ["another attempt at the same key"]
    reasons = differences(Ingredients.of(old), Ingredients.of(new))
    fields = [f"{r.name}: {shorten(r.old)} -> {shorten(r.new)}" for r in reasons if r.kind == "field"]
    inputs = [f"other {name}" for name in sorted(r.name for r in reasons if r.kind == "input")]
    return fields + inputs + [str(r) for r in reasons if r.kind == "version"]


def metrics(
    tables: Sequence[Mapping[str, Mapping[str, Any]]], evaluations: Sequence[Path], confidence: float
) -> list[dict[str, Any]]:
    """The closing tables of several evaluations, with differences relative to the first.

    `evaluations`: the folders that the stage made. Metrics that are not means over problems (win rates, refusals) have
    a difference without an interval. pass@k and cons@k have none where k is not the first's; their rows have each `k`.
    """
    found = []
    scores = [read_scores(folder) for folder in evaluations]
    for checkpoint in dict.fromkeys(name for table in tables for name in table):
        values = [
            by_metric(read_samples(folder / SAMPLES / checkpoint), kept.get(checkpoint)) if checkpoint in table else {}
            for table, folder, kept in zip(tables, evaluations, scores, strict=True)
        ]
        rows = [table.get(checkpoint, {}) for table in tables]
        of_sets = dict.fromkeys(name for row in rows for name in row if name.partition("/")[2] in COLUMNS)
        for metric in (*COLUMNS, *of_sets):
            if metric.endswith(INTERVAL) or all(row.get(metric) is None for row in rows):
                continue
            first = values[0].get(metric)
            ks = [_k(row, metric) if metric in row else None for row in rows] if metric.endswith("@k") else []
            found.append(
                {
                    "checkpoint": checkpoint,
                    "metric": metric,
                    "values": [row.get(metric) for row in rows],
                    "differences": [
                        None
                        if ks and ks[number] != ks[0]
                        else _against(rows[0].get(metric), row.get(metric), first, of.get(metric), confidence)
                        for number, (row, of) in enumerate(zip(rows[1:], values[1:], strict=True), 1)
                    ],
                    **({"k": ks} if ks else {}),
                }
            )
    return found


def _k(row: Mapping[str, Any], metric: str) -> int | None:
    """The k of a row's pass@k and cons@k, or of those of the metric's test set. In an evaluation by an earlier version,
    it was the number of samples a problem."""
    of_set = metric.removesuffix(metric.rpartition("/")[2])
    k, samples, problems = (row.get(of_set + name) for name in ("k", "samples", "problems"))
    return k if k is not None or not problems else samples // problems


def _against(
    old: float | None,
    new: float | None,
    old_values: Mapping[str, float] | None,
    new_values: Mapping[str, float] | None,
    confidence: float,
) -> dict[str, Any] | None:
    if old is None or new is None:
        return None
    if old_values and new_values:
        return asdict(mean_difference(old_values, new_values, confidence))
    return {"value": new - old, "low": None, "high": None, "paired": False, "problems": None}
