"""docs/gpu.md: the goals beside the figures of a run of benchmarks/gpu.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MARK = "<!-- the rest is written by `benchmarks/gpu.py --write` -->"

Results = dict[str, Any]
GOALS: dict[str, tuple[float, Callable[[Results], float]]] = {
    "MFU of an update at 1.5B": (0.45, lambda r: r["throughput"]["1.5B"]["mfu"]),
    "sampling with vLLM, share of vLLM's own tokens/s": (
        0.9,
        lambda r: r["vllm"]["engine"] / r["vllm"]["vllm"],
    ),
    "GRPO step, times faster than TRL's": (
        2.0,
        lambda r: r["trl"]["trl"]["seconds"] / r["trl"]["ours"]["seconds"],
    ),
    "memory of a GRPO step, times less than TRL's": (
        2.0,
        lambda r: r["trl"]["trl"]["gb"] / r["trl"]["ours"]["gb"],
    ),
}
"""The least that each figure shall be, on one H100, and where it is."""


def goals(results: Results) -> list[tuple[str, float, float | None]]:
    """Name, goal and figure of each; None where this run has none."""
    rows: list[tuple[str, float, float | None]] = []
    for name, (least, figure) in GOALS.items():
        try:
            rows.append((name, least, figure(results)))
        except (KeyError, TypeError, ZeroDivisionError):  # a part that failed or was left out
            rows.append((name, least, None))
    return rows


def page(results: Results) -> str:
    """The results of one machine in Markdown."""
    lines = [
        f"## On {results['machine']}",
        "",
        "By `python benchmarks/gpu.py`.",
        "",
        "| goal | at least | figure | |",
        "|---|--:|--:|---|",
    ]
    for name, least, figure in goals(results):
        told = ("not measured", "") if figure is None else (f"{figure:.2f}", "met" if figure >= least else "missed")
        lines.append(f"| {name} | {least:g} | {told[0]} | {told[1]} |")
    lines.append("")
    for name, result in results.items():
        if isinstance(result, dict):
            lines += [f"### {name.capitalize()}", "", "```json", json.dumps(result, indent=1), "```", ""]
    return "\n".join(lines)


def write_page(path: Path, machines: Sequence[Results]) -> None:
    """Keeps what the file says up to its mark, and replaces the rest: the results of each machine."""
    text = path.read_text() if path.exists() else "# On a GPU\n"
    before = text.split(MARK)[0].rstrip()
    pages = "\n".join(map(page, machines))
    path.write_text(f"{before}\n\n{MARK}\n\n{pages}")
