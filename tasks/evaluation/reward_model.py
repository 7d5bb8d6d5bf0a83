"""Quality of a reward model on held-out preferences: accuracy, calibration, agreement with the judge, score spread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo.data.held_out import ScoredRow, is_correct
from tasks.evaluation.metrics import RESAMPLES
from tasks.preferences.judged import JUDGE
from tasks.sft_data.statistics import prompt_text

CONFIDENCE = 0.95
BINS = 10
_SCORES = ("chosen_score", "rejected_score", "score")


@dataclass(frozen=True)
class Quality:
    """`metrics` by name; one row per non-empty bin of `calibration` and per verdict strength of `agreement`; scores of
    the better and worse responses (chosen and rejected, or safe and unsafe)."""

    metrics: dict[str, float]
    calibration: list[dict[str, float]]
    agreement: list[dict[str, float]]
    scores: dict[str, list[float]]


def quality(rows: Sequence[ScoredRow]) -> Quality:
    """Quality on at least one row. All rows must be pairs, or all must be labels.

    - held_out_accuracy, _low, _high: share of rows that are right, with its bootstrap interval over prompts. -
    held_out_calibration_error: see `calibration`. - held_out_NAME_mean, _std: mean and standard deviation of the scores
    in `scores`. - labels only: held_out_safe_right, held_out_unsafe_right: accuracy on safe and on unsafe responses. -
    ensembles only: held_out_uncertainty_right, _wrong: mean uncertainty on rows where the mean score is right or wrong.
    """
    pairs = "label" not in rows[0]
    right = [is_correct(row) for row in rows]
    low, high = interval(rows, right)
    chances = [_chance(row) for row in rows]
    bins = calibration(chances, right if pairs else [bool(row["label"]) for row in rows], 0.5 if pairs else 0.0)
    scores = _scores(rows, pairs)
    metrics = {"accuracy": _mean(right), "accuracy_low": low, "accuracy_high": high, "calibration_error": _error(bins)}
    for name, values in scores.items():
        if values:
            metrics |= {f"{name}_mean": float(np.mean(values)), f"{name}_std": float(np.std(values))}
            metrics |= {} if pairs else {f"{name}_right": _mean([(v > 0) == (name == "safe") for v in values])}
    if "uncertainty" in rows[0]:
        for name, outcome in (("right", True), ("wrong", False)):
            spread = [row["uncertainty"] for row, ok in zip(rows, right, strict=True) if ok == outcome]
            metrics |= {f"uncertainty_{name}": _mean(spread)} if spread else {}
    named = {f"held_out_{name}": value for name, value in metrics.items()}
    return Quality(named, bins, agreement(rows) if pairs else [], scores)


def interval(rows: Sequence[ScoredRow], right: Sequence[bool]) -> tuple[float, float]:
    """Bootstrap interval of the accuracy. Prompts are resampled, because judgments of responses to one prompt are not
    independent."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for row, ok in zip(rows, right, strict=True):
        groups[prompt_text(row["messages"])].append(ok)
    hits = np.array([sum(group) for group in groups.values()])
    sizes = np.array([len(group) for group in groups.values()])
    rng = np.random.default_rng(0)
    draws = (rng.integers(len(sizes), size=len(sizes)) for _ in range(RESAMPLES))
    shares = [hits[drawn].sum() / sizes[drawn].sum() for drawn in draws]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(shares, [tail, 1 - tail])
    return float(low), float(high)


def calibration(chances: Sequence[float], came_true: Sequence[bool], lowest: float) -> list[dict[str, float]]:
    """Predicted and observed shares, in ten bins of equal width from `lowest` to 1.

    For a label, the prediction is the probability of "safe". For a pair, it is the probability that the response with
    the higher score is the chosen one: sigma(|r_w - r_l|), at least 0.5. With bins of sigma(r_w - r_l) itself, the
    share right would be 0 below one half and 1 above, whatever the model.
    """
    width = (1 - lowest) / BINS
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for chance, true in zip(chances, came_true, strict=True):
        bins[min(BINS - 1, int((chance - lowest) / width))].append((chance, true))
    return [
        {
            "from": lowest + number * width,
            "to": lowest + (number + 1) * width,
            "predicted": _mean([chance for chance, _ in rows_of_bin]),
            "right": _mean([true for _, true in rows_of_bin]),
            "count": len(rows_of_bin),
        }
        for number, rows_of_bin in sorted(bins.items())
    ]


def agreement(rows: Sequence[ScoredRow]) -> list[dict[str, float]]:
    """Share of judged pairs that model and judge order alike, by strength of the judge's verdict, rounded to the
    nearest quarter (the resolution of four votes)."""
    by_strength: dict[float, list[bool]] = defaultdict(list)
    for row in rows:
        if row["source"] == JUDGE:
            by_strength[round(row["strength"] * 4) / 4].append(is_correct(row))
    return [
        {"strength": strength, "agree": _mean(rows_of_strength), "count": len(rows_of_strength)}
        for strength, rows_of_strength in sorted(by_strength.items())
    ]


def combine(members: Sequence[Sequence[ScoredRow]]) -> list[ScoredRow]:
    """Combines the held-out rows of an ensemble: mean scores, and `uncertainty`, the standard deviation over members of
    the difference r_w - r_l for a pair, or of the score for a labelled response."""
    combined = []
    for row, *others in zip(*members, strict=True):
        rows = [row, *others]
        means = {name: _mean([r[name] for r in rows]) for name in _SCORES if name in row}
        combined.append({**row, **means, "uncertainty": float(np.std([_decides(r) for r in rows]))})
    return combined


def tables(name: str, measured: Quality) -> dict[str, list[dict[str, Any]]]:
    """Tables for display, by name."""
    rows_of_table = {f"{name}_calibration": measured.calibration, f"{name}_agreement": measured.agreement}
    return {table: rows for table, rows in rows_of_table.items() if rows}


def _decides(row: ScoredRow) -> float:
    return float(row["score"] if "label" in row else row["chosen_score"] - row["rejected_score"])


def _chance(row: Mapping[str, Any]) -> float:
    logit = row["score"] if "label" in row else abs(row["chosen_score"] - row["rejected_score"])
    return float(1 / (1 + np.exp(-np.clip(logit, -700, 700))))


def _scores(rows: Sequence[ScoredRow], pairs: bool) -> dict[str, list[float]]:
    if pairs:
        return {name: [row[f"{name}_score"] for row in rows] for name in ("chosen", "rejected")}
    return {
        name: [row["score"] for row in rows if row["label"] == label] for name, label in (("safe", 1), ("unsafe", 0))
    }


def _error(bins: Sequence[Mapping[str, float]]) -> float:
    """Expected calibration error: |predicted - right|, averaged over rows."""
    total = sum(row["count"] for row in bins)
    return sum(abs(row["predicted"] - row["right"]) * row["count"] for row in bins) / total


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values))
