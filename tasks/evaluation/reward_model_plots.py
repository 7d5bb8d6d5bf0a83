"""Plots of a reward model on held-out preferences: calibration, scores, agreement with the judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tasks.evaluation.reward_model import Quality
from tasks.sft_data.plots import new_figure


def plot(measured: Quality, folder: Path, name: str) -> list[Path]:
    """Writes NAME_calibration.png, NAME_scores.png and, for judged pairs, NAME_agreement.png into `folder`, which is
    created. Deterministic."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"calibration": _calibration(measured), "scores": _scores(measured)}
    if measured.agreement:
        pictures["agreement"] = _agreement(measured)
    paths = [folder / f"{name}_{kind}.png" for kind in pictures]
    for path, picture in zip(paths, pictures.values(), strict=True):
        picture.savefig(path, dpi=120, metadata={"Software": None})
    return paths


def _calibration(measured: Quality) -> Any:
    """Accuracy against predicted probability; a calibrated model lies on the diagonal. Below it, the number of rows per
    bin."""
    picture = new_figure(4.8)
    above, below = picture.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    bins = measured.calibration
    lowest = 0.5 if "chosen" in measured.scores else 0.0
    above.plot([lowest, 1], [lowest, 1], color="grey", linestyle="dashed", label="calibrated")
    above.plot([row["predicted"] for row in bins], [row["right"] for row in bins], marker="o", label="held out")
    above.set_ylim(-0.02, 1.02)
    above.set_ylabel("share right")
    above.set_title(f"expected calibration error {measured.metrics['held_out_calibration_error']:.3f}")
    above.legend(fontsize=8)
    left, widths = [row["from"] for row in bins], [row["to"] - row["from"] for row in bins]
    below.bar(left, [row["count"] for row in bins], width=widths, align="edge", edgecolor="white")
    below.set_ylabel("rows")
    below.set_xlabel("predicted chance")
    return picture


def _scores(measured: Quality) -> Any:
    """Overlaid histograms of the scores of better and worse responses."""
    picture = new_figure(3.6)
    axes = picture.add_subplot()
    edges = np.histogram_bin_edges([value for values in measured.scores.values() for value in values], bins=30)
    for name, values in measured.scores.items():
        axes.hist(values, bins=edges, alpha=0.6, label=f"{name}: {len(values):,}")
    axes.set_xlabel("score")
    axes.set_ylabel("rows")
    axes.set_title(f"{measured.metrics['held_out_accuracy']:.1%} of the held-out rows are right")
    axes.legend(fontsize=8)
    return picture


def _agreement(measured: Quality) -> Any:
    """Share of pairs ordered as by the judge, for each strength of its verdict."""
    picture = new_figure(3.6)
    axes = picture.add_subplot()
    names = [f"{row['strength']:g}" for row in measured.agreement]
    bars = axes.bar(names, [row["agree"] for row in measured.agreement])
    axes.bar_label(bars, [f"{row['count']:,}" for row in measured.agreement], fontsize=8)
    axes.axhline(0.5, color="grey", linestyle="dashed")
    axes.set_ylim(0, 1.1)
    axes.set_xlabel("strength of the judge's verdict; above the bars, pairs")
    axes.set_ylabel("share ordered alike")
    return picture
