"""Plots of a data set for the report: outcomes of the samples, and lengths of the examples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.sft_data.statistics import KEPT, funnel

FUNNEL, TOKENS = "funnel.png", "tokens.png"


def plot(statistics: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes funnel.png and tokens.png into `folder`, which is created. Deterministic."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {FUNNEL: _funnel(statistics), TOKENS: _tokens(statistics)}
    for name, figure in pictures.items():
        figure.savefig(folder / name, dpi=120, metadata={"Software": None})
    return [folder / name for name in pictures]


def new_figure(height: float) -> Any:
    """An empty figure, 8 inches wide."""
    # pyplot would keep figures for the whole process and look for a display.
    from matplotlib.figure import Figure

    return Figure(figsize=(8, height), layout="constrained")


def _funnel(statistics: Mapping[str, Any]) -> Any:
    """One bar per outcome, with the parts side by side; kept samples at the bottom."""
    (_, _, *parts), (_, *rows) = funnel(statistics["lines"], "part")
    figure = new_figure(1.6 + 0.3 * len(rows))
    axes = figure.add_subplot()
    names = [row[0] for row in rows]
    left = [0] * len(rows)
    for number, part in enumerate(parts):
        widths = [row[2 + number] for row in rows]
        axes.barh(names, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row in rows:
        share = row[1] / max(1, statistics["sampled"])
        axes.annotate(f" {row[1]:,} ({share:.1%})", (row[1], row[0]), va="center", fontsize=8)
    axes.get_yticklabels()[names.index(KEPT)].set_fontweight("bold") if KEPT in names else None
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel("samples")
    axes.set_title(f"{statistics['kept']:,} of {statistics['sampled']:,} samples are in the data set")
    axes.legend(title="part", fontsize=8)
    return figure


def _tokens(statistics: Mapping[str, Any]) -> Any:
    """A histogram of the examples' lengths, with the parts stacked."""
    edges, parts = statistics["tokens"]["edges"], statistics["tokens"]["parts"]
    figure = new_figure(3.6)
    axes = figure.add_subplot()
    bottom = [0] * (len(edges) - 1)
    for name, part in parts.items():
        label = f"{name}: median {part['median']:,}"
        axes.bar(edges[:-1], part["counts"], width=edges[1], align="edge", bottom=bottom, label=label)
        bottom = [a + b for a, b in zip(bottom, part["counts"], strict=True)]
    axes.set_xlabel("tokens of the response, as sampled")
    axes.set_ylabel("examples")
    axes.legend(fontsize=8)
    return figure
