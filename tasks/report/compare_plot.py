"""Plots learning curves of several runs in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tasks.report.curves import Points, pictures, thin
from tasks.tracking.reader import RunReader
from tasks.tracking.recipe_run import RecipeRun, StageRun

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colors, which color-blind readers can distinguish; line styles differ as well."""
_STYLES = ("-", "--", ":", "-.")
_COLUMNS = 3
_PARTS = {"reward", "reward_accuracy"}
Panel = tuple[str, list[tuple[int, Points]]]


def plot(reader: RunReader, runs: Sequence[RecipeRun], labels: Sequence[str], path: Path) -> Path | None:
    """Plots the curves of stages whose artifacts differ between the runs. Returns None if there are none."""
    panels = [panel for name in _names(runs) for panel in _panels(reader, name, [run.stage(name) for run in runs])]
    if not panels:
        return None
    # pyplot would keep figures for the whole process and look for a display.
    from matplotlib.figure import Figure

    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(4 * _COLUMNS, 2.7 * rows + 0.4 * len(runs)), layout="constrained")
    axes = figure.subplots(rows, _COLUMNS, squeeze=False).flatten()
    for place, (title, lines) in zip(axes, panels, strict=False):
        for number, points in lines:
            style = {"color": COLOURS[number % len(COLOURS)], "linestyle": _STYLES[number % len(_STYLES)]}
            label = _literal(labels[number])
            place.plot([x for x, _ in points], [y for _, y in points], label=label, linewidth=1.6, **style)
        place.set_title(_literal(title), fontsize=9)
        place.tick_params(labelsize=8)
        place.grid(alpha=0.25)
    for place in axes[len(panels) :]:
        place.set_visible(False)
    drawn = {label: handle for place in axes for handle, label in zip(*place.get_legend_handles_labels(), strict=True)}
    figure.legend(list(drawn.values()), list(drawn), loc="outside upper left", fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return path


def _literal(text: str) -> str:
    """The text for matplotlib, which would read what is between two $ as a formula, and refuse a wrong one."""
    return text.replace("$", r"\$")


def _names(runs: Sequence[RecipeRun]) -> list[str]:
    return list(dict.fromkeys(stage.name for run in runs for stage in run.stages))


def _panels(reader: RunReader, name: str, stages: Sequence[StageRun | None]) -> list[Panel]:
    """One panel per metric of a stage. A run that shares another run's artifact has no line of its own."""
    makers: dict[str, int] = {}
    for number, stage in enumerate(stages):
        if stage is not None:
            makers.setdefault(stage.maker.id, number)
    if len(makers) < 2:
        return []
    logged = [stage.maker.metrics for stage in stages if stage is not None]
    drawn = [
        (picture.title if label != "accuracy" else "Accuracy", metric)
        for picture in pictures(sorted({metric for metrics in logged for metric in metrics}))
        for label, metric in picture.parts
        if not metric.startswith("reward") or metric in _PARTS
    ]
    panels = []
    for title, metric in drawn:
        lines = [(number, thin(reader.curve(maker, metric))) for maker, number in makers.items()]
        shown = "Reward" if metric == "reward" else f"{title} ({metric})" if "/" in metric else title
        if any(points for _, points in lines):
            panels.append((f"{name}: {shown}", [(number, points) for number, points in lines if points]))
    return panels
