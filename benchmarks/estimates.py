"""Estimates of a recipe against what its run took, stage by stage: before the first run, and after one.

    python benchmarks/estimates.py tiny
    python benchmarks/estimates.py smollm2-135m --set base.model=./SmolLM2-135M
    python benchmarks/estimates.py tiny --small --home build/estimates    # minutes less, for a look

Runs the recipe twice, with the seeds 0 and 1, in a home of its own; a run that is there already is not made again. The
second run is compared with the estimate from settings alone and with the one that knows the first run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from flows.recipe.load import load_recipe
from flows.run.earlier_builds import is_on
from flows.run.estimate import Assumptions, estimate, with_prompts
from flows.run.plan import existing
from flows.stage_graphs import GRAPHS
from tasks.estimate.devices import Device
from tasks.estimate.local_device import local_device
from tasks.estimate.stages import Estimate
from tasks.store.manifest import Manifest
from tasks.store.store import Store
from tests.support.r1 import SMALLER

FIRST, SECOND = 0, 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--small", action="store_true", help="tests/support/r1.py's smaller miniature (tiny only)")
    parser.add_argument("--home", type=Path, default=Path("build/estimates"))
    args = parser.parse_args()
    os.environ["R1FLOW_HOME"] = str(args.home.absolute())
    overrides = [*(SMALLER if args.small else []), *args.set]
    for seed in (FIRST, SECOND):
        run(args.recipe, overrides, seed)
    print(table(rows(args.recipe, overrides, args.home.absolute())))


def run(recipe: str, overrides: list[str], seed: int) -> None:
    """One run of the recipe; stages that are there are reused."""
    sets = [part for value in overrides for part in ("--set", value)]
    command = [sys.executable, "-m", "flows.cli", "run", recipe, "--seed", str(seed), *sets]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1])


def rows(name: str, overrides: list[str], home: Path) -> list[dict[str, Any]]:
    """Each stage's two estimates and the second run's numbers; time in seconds, memory in GB."""
    recipe = load_recipe(name, overrides, SECOND)
    graph = GRAPHS["r1"](recipe)
    device = local_device(home)
    second = {step.name: existing(step.name, graph, recipe) for step in graph}
    others = {manifest.key for manifest in second.values() if manifest}
    earlier = [manifest for manifest in Store(home).list() if manifest.key not in others]
    known = with_prompts(Assumptions(device, builds=earlier), graph, recipe)
    before = estimate(graph, recipe, with_prompts(Assumptions(device), graph, recipe))
    after = estimate(graph, recipe, known)
    return [
        row(step.name, before[step.name], after[step.name], made, device)
        for step in graph
        if (made := second[step.name]) is not None
    ]


def row(name: str, before: Estimate, after: Estimate, made: Manifest, device: Device) -> dict[str, Any]:
    if not is_on(made, device):
        raise SystemExit(f"{name}: its second build was interrupted or made elsewhere; give another --home")
    return {
        "stage": name,
        "before_s": before.seconds,
        "after_s": after.seconds,
        "actual_s": made.seconds,
        "source": after.source,
        "before_gb": (before.peak or 0) / 1e9,
        "after_gb": (after.peak or 0) / 1e9,
        "actual_gb": (made.peak_memory or 0) / 1e9,
    }


def table(found: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| stage | before, s | after one run | took | before / took | after / took | before, GB | after | held |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for of in found:
        ratios = f"{of['before_s'] / of['actual_s']:.2f} | {of['after_s'] / of['actual_s']:.2f}"
        seconds = " | ".join(f"{of[name]:.1f}" for name in ("before_s", "after_s", "actual_s"))
        memory = " | ".join(f"{of[name]:.2f}" for name in ("before_gb", "after_gb", "actual_gb"))
        lines.append(f"| {of['stage']} | {seconds} | {ratios} | {memory} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
