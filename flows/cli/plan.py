"""The command `r1 plan`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from flows.cli.options import add_estimate, add_selection, selection_of
from flows.cli.terminal import print_row, print_text


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("plan", help="what a run would do, and why")
    add_selection(command)
    command.add_argument("--force", action="append", default=[], metavar="STAGE")
    command.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    add_estimate(command)


def run(args: argparse.Namespace) -> int:
    """Prints what a run would do. Returns the exit code."""
    from flows.cli import plan_model
    from flows.progress import duration
    from flows.recipe.load import load_recipe
    from flows.run.plan import plan
    from flows.stage_graphs import GRAPHS
    from tasks.evaluation.programs import unwalled_programs

    recipe = load_recipe(args.recipe, args.overrides, args.seed)
    graph = GRAPHS[args.flow](recipe)
    planned = plan(graph, recipe, selection_of(args))
    runs_base = any(p.name == "base" and p.status == "run" for p in planned)
    model = plan_model.check(recipe, [p.name for p in planned]) if runs_base else None
    estimated: dict[str, Any] | None = None
    if args.estimate or args.calibrate:
        from flows.cli import plan_estimate

        estimated = plan_estimate.make(args, graph, recipe)
    unwalled = unwalled_programs(recipe.problems.sources, recipe.evaluate.sets)
    if args.json:
        result = {"recipe": recipe.name, "stages": [vars(p) for p in planned]}
        result |= {"sandbox": unwalled} if unwalled else {}
        print(json.dumps(result | ({"model": model} if model else {}) | ({"estimate": estimated} if estimated else {})))
        return 0
    print_text(f"{recipe.name}: {recipe.description}", indent="  ")
    for p in planned:
        took = f"(last took {duration(p.took)})" if p.status == "run" and p.took is not None else ""
        print_row(f"  {p.name:<16} {p.status:<6} {p.why} {took}".rstrip())
    if unwalled:
        print_text(unwalled, indent="  ")
    if model:
        print_text(plan_model.describe(model), indent="  ")
    if estimated:
        plan_estimate.show(estimated, [p.name for p in planned if p.status == "run"])
    return 0
