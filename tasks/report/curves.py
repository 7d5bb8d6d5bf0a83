"""Learning curves of a run's stages: which metrics share a plot, and their values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tasks.tracking.reader import RunReader
from tasks.tracking.recipe_run import StageRun

Points = list[tuple[float, float]]
_MOST_POINTS = 240
_VALIDATION = "validation/"
_FINAL = "final/"
"""Prefix of numbers that a stage logs once, at its end."""
_NOT_PARTS = ("_mean", "_std", "_failures")


@dataclass(frozen=True)
class Picture:
    """Curves that share axes. `parts`: metrics in legend order."""

    title: str
    parts: tuple[tuple[str, str], ...]  # (name in the legend, metric)


def pictures(metrics: Iterable[str]) -> Iterator[Picture]:
    """The plots for a stage that logged these metrics."""
    names = {name for name in metrics if not name.startswith(_FINAL)}
    if "reward" in names:
        yield Picture("Reward", (("reward", "reward"),))
        for name in sorted(names):  # each on its own axes: a rule gives 0 or 1, a reward model any number
            if name.startswith("reward_") and not name.endswith(_NOT_PARTS) and "/" not in name:
                yield Picture(f"Reward, {name.removeprefix('reward_').replace('_', ' ')}", ((name, name),))
    asked = [m for m in sorted(names) if m.startswith(_VALIDATION) and not m.startswith(f"{_VALIDATION}completion_")]
    if asked:
        yield Picture("On validation problems", tuple((m.removeprefix(_VALIDATION), m) for m in asked))
    single = {
        "completion_tokens": "Completion length, tokens",
        "sampled_entropy": "Entropy of sampled tokens, nats",
        "kl": "KL to the reference, nats",
    }
    if "reward" in names:
        yield from (Picture(title, ((metric, metric),)) for metric, title in single.items() if metric in names)
        return
    losses = [name for name in sorted(names) if name == "loss" or name.endswith("/loss")]
    if losses:
        yield Picture("Training loss, nats", tuple((name.removesuffix("/loss"), name) for name in losses))


def read(reader: RunReader, stage: StageRun) -> Iterator[tuple[Picture, dict[str, Points]]]:
    """Every plot of a stage with its curves, thinned to plot resolution. A single point is not a curve."""
    for picture in pictures(stage.maker.metrics):
        curves = {name: thin(reader.curve(stage.maker.id, metric)) for name, metric in picture.parts}
        if shown := {name: points for name, points in curves.items() if len(points) > 1}:
            yield picture, shown


def thin(points: Sequence[tuple[int, float]]) -> Points:
    """Reduces a curve to at most 240 points, each the mean of consecutive steps. NaN and infinity are left out."""
    finite = [(float(x), y) for x, y in points if math.isfinite(y)]
    size = math.ceil(len(finite) / _MOST_POINTS)
    if size <= 1:
        return finite
    groups = [finite[i : i + size] for i in range(0, len(finite), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
