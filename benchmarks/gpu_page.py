"""docs/gpu.md: the goals beside the figures of a run of benchmarks/gpu.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from arguments import write_output
from gpu_results import NO_TIME, Results
from gpu_throughput import AS_TRAINED

MARK = "<!-- the rest is written by `benchmarks/gpu.py --write` -->"

MFU = "MFU of an update at 1.5B"
GOALS: dict[str, tuple[float, Callable[[Results], float]]] = {
    MFU: (0.45, lambda r: r["throughput"]["1.5B"]["mfu"]),
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


@dataclass(frozen=True)
class Check:
    """What is wrong on any device if its figure is above `most`."""

    name: str
    most: float
    figure: Callable[[Results], float | None]


CHECKS = (
    Check("models: wrong kinds", 0, lambda r: len(r["models"]["wrong"])),
    # Adam divides a gradient by its size, so one that is rounding may go either way: up to 2 learning rates a step.
    Check("step: difference of a weight, learning rates", 2, lambda r: r["step"]["weights_lr"]),
    Check(
        "step: sampler against trainer in float32, mean nats",
        0.01,
        lambda r: r["step"]["sampler_difference"]["float32"]["mean"],
    ),
    Check("resume: other bits", 0, lambda r: not r["resume"]["same_bits"]),
    Check("waits: in 64 steps of sampling", 12, lambda r: r["waits"]["sampling"]),
    Check("waits: in an update", 0, lambda r: r["waits"]["update"]),
    Check("shards: not read by shards", 0, lambda r: not r["shards"]["read_by_shards"]),
    Check("shards: difference of a weight", 0, lambda r: r["shards"]["weights"]),
    Check("shards: difference of a gradient", 0, lambda r: r["shards"]["gradients"]),
    Check("attention: FlexAttention, largest difference, nats", 0.5, lambda r: r["attention"]["difference"]),
    Check("learning: fall of the reward in 20 steps or more", 0, lambda r: _fall(r["learning"])),
)


def _fall(learning: Results) -> float | None:
    return learning["first"] - learning["last"] if len(learning["rewards"]) >= 20 else None


def checks(results: Results) -> list[tuple[Check, float | None]]:
    """Each check with its figure; None where this run has none."""
    return [(check, _figure(check.figure, results)) for check in CHECKS]


def wrong(results: Results) -> list[tuple[Check, float]]:
    """The checks that fail. A figure that is no number fails too."""
    return [(check, figure) for check, figure in checks(results) if figure is not None and not figure <= check.most]


def _figure(figure: Callable[[Results], float | None], results: Results) -> float | None:
    try:
        found = figure(results)
    except (KeyError, TypeError, ZeroDivisionError):  # a part that failed or was left out
        return None
    return found if found is None else float(found)


def goals(results: Results) -> list[tuple[str, float, float | None]]:
    """Name, goal and figure of each; None where this run has none."""
    return [(name, least, _figure(figure, results)) for name, (least, figure) in GOALS.items()]


def verdict(name: str, least: float, figure: float | None, results: Results) -> str:
    """Whether a goal is met. Earlier runs updated in less time than the trainer, without fixed order and clipping."""
    if figure is None:
        return ""
    if figure < least:
        return "missed"
    if name == MFU and not results["throughput"]["1.5B"].get(AS_TRAINED):
        return "only without fixed order and clipping"
    return "met"


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
        told = "not measured" if figure is None else f"{figure:.2f}"
        lines.append(f"| {name} | {least:g} | {told} | {verdict(name, least, figure, results)} |")
    lines += ["", "| check | at most | figure | |", "|---|--:|--:|---|"]
    for check, figure in checks(results):
        told = (
            ("not measured", "") if figure is None else (f"{figure:.2g}", "right" if figure <= check.most else "wrong")
        )
        lines.append(f"| {check.name} | {check.most:g} | {told[0]} | {told[1]} |")
    lines.append("")
    if NO_TIME in results:
        lines += [f"There was no time for: {', '.join(results[NO_TIME])}.", ""]
    for name, result in results.items():
        if isinstance(result, dict):
            lines += [f"### {name.capitalize()}", "", "```json", json.dumps(result, indent=1), "```", ""]
    return "\n".join(lines)


def write_page(path: Path, machines: Sequence[Results]) -> None:
    """Keeps what the file says up to its mark, and replaces the rest: the results of each machine."""
    text = path.read_text() if path.exists() else "# On a GPU\n"
    before = text.split(MARK)[0].rstrip()
    pages = "\n".join(map(page, machines))
    write_output(path, f"{before}\n\n{MARK}\n\n{pages}")
