"""The page and the pictures of benchmarks/growth.py."""

from __future__ import annotations

import argparse
import itertools
import os
import textwrap
from collections.abc import Callable
from pathlib import Path

from growth_points import AXES, Axis, Record
from machine import measured_by

MAX_GROWTH = 1.3


def doublings(series: dict[str, dict[float, Record]], of: Callable[[Record], float]) -> dict[str, list[float]]:
    """By how much `of` grows from each point of a series to the next."""
    return {name: [of(b) / of(a) for a, b in itertools.pairwise(points.values())] for name, points in series.items()}


def held(result: Record) -> float:
    return max(result["held_mb"].values())


def markdown(results: dict[str, dict[str, dict[float, Record]]], args: argparse.Namespace, minutes: float) -> str:
    chosen = "".join(f" --axis {name}" for name in args.axis or ()) + options(args)
    intro = f"""
    {measured_by(f"python benchmarks/growth.py{chosen}")} float32, AdamW, {args.threads} thread(s) where nothing
    else is said; {minutes:.0f} minutes. Every point is a process of its own. Completions cannot end by themselves, so
    each has exactly the length that is named. Seconds are means over the timed steps, after one of short completions to
    warm up. A step is sampling, measuring (the reference's log-probabilities) and update, and what is done between
    them. Peak: the process with its children (one of them scores), libraries included. Held: the most that the trainer
    held in a phase beyond what it held before it loaded a model.
    """
    lines = ["# How time and memory grow", "", *prose(intro)]
    if "length" in results:
        lines += prose(claim(results["length"]))
    for name, series in results.items():
        lines += _section(AXES[name], series, f"images/growth-{name}.png" if args.output else None)
    return "\n".join(lines)


def options(args: argparse.Namespace) -> str:
    """Of the command, as it was args."""
    threads = f" --threads {args.threads}" if args.threads != os.cpu_count() else ""
    return threads + (f" --output {args.output}" if args.output else "")


def claim(of_length: dict[str, dict[float, Record]]) -> str:
    grown, beyond = doublings(of_length, lambda r: r["peak_mb"]), doublings(of_length, held)
    verdict = "holds" if max(itertools.chain(*grown.values())) < MAX_GROWTH else "DOES NOT HOLD"
    said = "; ".join(
        f"{series} {', '.join(f'{g:.2f}' for g in of)} (held: {', '.join(f'{g:.2f}' for g in beyond[series])})"
        for series, of in grown.items()
    )
    return f"""
    **Peak memory grows by less than {MAX_GROWTH} times when completions get twice as long, with as many tokens a
    micro-batch: {verdict}.** Growth at each doubling: {said}.
    """


def prose(text: str, mark: str = "") -> list[str]:
    """A paragraph wrapped at 120 characters and a blank line after it; with a `mark`, a list item without one."""
    lines = textwrap.wrap(
        " ".join(text.split()),
        120,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines if mark else [*lines, ""]


def _section(axis: Axis, series: dict[str, dict[float, Record]], picture: str | None) -> list[str]:
    parts = list(next(iter(next(iter(series.values())).values()))["parts"])
    heads = [axis.unit, "seconds", *(f"{part}, s" for part in parts if part != "job"), "tokens/s", "peak, MB"]
    heads += [f"held, {part}, MB" for part in parts]
    lines = [f"## {axis.title}", "", *prose(axis.fixed)]
    lines += [f"![{axis.title}: seconds and memory]({picture})", ""] if picture else []
    lines += [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, points in series.items():
        for value, result in points.items():
            cells = [name, f"{value:,}", f"{result['seconds']:.2f}"]
            cells += [f"{s:.2f}" for part, s in result["parts"].items() if part != "job"]
            cells += [f"{result['tokens_per_s']:,.0f}", f"{result['peak_mb']:,.0f}"]
            cells += [f"{mb:,.0f}" for mb in result["held_mb"].values()]
            lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for name, points in series.items():
        lines += prose(_growth(name, axis, points), "- ")
    return [*lines, ""]


def _growth(name: str, axis: Axis, points: dict[float, Record]) -> str:
    (first, start), (last, end) = next(iter(points.items())), list(points.items())[-1]
    times = {p: end["parts"][p] / start["parts"][p] for p in start["parts"] if p != "job"}
    of_parts = f" ({', '.join(f'{part} {grown:.1f}' for part, grown in times.items())})" if times else ""
    return f"""
    {name}, {last / first:.0f} times the {axis.unit.removeprefix("million ")}:
    {end["seconds"] / start["seconds"]:.1f} times the seconds{of_parts}, {end["peak_mb"] / start["peak_mb"]:.2f} times
    the peak, {held(end) / held(start):.2f} times the held memory.
    """


def draw(axis: Axis, series: dict[str, dict[float, Record]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, panels = pyplot.subplots(2, len(series), figsize=(4.5 * len(series), 6.5), squeeze=False, sharex="col")
    for (name, points), (time_panel, memory_panel) in zip(series.items(), panels.T, strict=True):
        values = list(points)
        for part in next(iter(points.values()))["parts"]:
            label = "whole job" if part == "job" else part
            time_panel.plot(values, [r["parts"][part] for r in points.values()], "o-", label=label)
            memory_panel.plot(values, [r["held_mb"][part] for r in points.values()], "o-", label=f"held, {label}")
        memory_panel.plot(values, [r["peak_mb"] for r in points.values()], "k.--", label="peak of the processes")
        time_panel.set(title=name, ylabel="seconds", xscale="log", yscale="log")
        time_panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        time_panel.yaxis.set_major_formatter("{x:g}")
        time_panel.yaxis.set_minor_formatter(NullFormatter())
        memory_panel.set(xlabel=axis.unit, ylabel="MB", ylim=(0, None), xscale="log")
        memory_panel.set_xticks(values, [f"{value:,}" for value in values], minor=False)
        memory_panel.minorticks_off()
        for panel in (time_panel, memory_panel):
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
    figure.suptitle(axis.title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
