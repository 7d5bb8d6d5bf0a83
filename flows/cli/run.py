"""The command `r1 run`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from flows.cli.options import add_selection, selection_of
from flows.cli.terminal import print_text, width
from flows.home import home, tracking
from grpo.errors import InputError
from grpo.secret_values import masked

if TYPE_CHECKING:
    from flows.recipe.schema import Recipe


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("run", help="run a recipe; what exists is reused")
    add_selection(command)
    command.add_argument("--force", action="append", default=[], metavar="STAGE", help="make it again (repeatable)")
    command.add_argument("--json", action="store_true", help="print the result as JSON, the last line of stdout")
    command.add_argument(
        "--approve", action="append", default=[], metavar="GATE", help="let this gate pass if it would ask (repeatable)"
    )
    command.add_argument(
        "--dispatch", action="store_true", help="run the stages on their work pools; see docs/operations.md"
    )


def run(args: argparse.Namespace) -> int:
    """Runs a recipe. Returns the exit code."""
    from flows.prefect_server import keeps_runs, prefect_server
    from flows.recipe.load import load_recipe
    from tasks.trainer.rendezvous import Rendezvous

    rendezvous = Rendezvous.of_environment(home())
    if rendezvous is not None and rendezvous.rank > 0:
        from tasks.trainer.node import run_node

        return run_node(rendezvous)
    recipe = load_recipe(args.recipe, args.overrides, args.seed)
    # Checked first, because a mistake then needs no server and leaves no empty database.
    everything_exists = _check(args, recipe)
    if everything_exists and rendezvous is None and not keeps_runs():
        from flows.run.executor import run_pipeline

        selection = selection_of(args)
        return _run(
            lambda: run_pipeline(args.flow, args.recipe, args.overrides, args.seed, selection, False), args, recipe
        )
    with prefect_server(home() / "logs"), rendezvous.lead() if rendezvous else nullcontext():
        return _run(lambda: _run_flow(args), args, recipe)


def _check(args: argparse.Namespace, recipe: Recipe) -> bool:
    """Checks everything else that can be wrong. Returns whether the run will make nothing. Such a run needs no Prefect
    server of its own, whose start takes longer than everything else."""
    from flows.prefect_server import keeps_runs
    from flows.run.plan import plan as make_plan
    from flows.stage_graphs import GRAPHS
    from tasks.evaluation.programs import unwalled_programs

    planned = make_plan(GRAPHS[args.flow](recipe), recipe, selection_of(args))
    if not args.dispatch and (unwalled := unwalled_programs(recipe.problems.sources, recipe.evaluate.sets)):
        print(f"warning: {unwalled}; see docs/sandbox.md", file=sys.stderr)
    if args.dispatch and not keeps_runs():
        raise InputError(
            "--dispatch needs a Prefect server with workers: start one with `r1 up`, or set PREFECT_API_URL"
        )
    tracking().open()
    return all(stage.status != "run" for stage in planned) and not any(gate.evaluate for gate in recipe.gates)


def _run_flow(args: argparse.Namespace) -> dict[str, Any]:
    from flows.prefect_flows import RECIPE_FLOWS

    selection = selection_of(args)
    return RECIPE_FLOWS[args.flow](
        recipe=args.recipe,
        overrides=args.overrides,
        seed=args.seed,
        start=args.start,
        only=args.only,
        force=args.force,
        inputs=dict(selection.inputs),
        approve=args.approve,
        dispatch=args.dispatch,
    )


def _run(start: Callable[[], dict[str, Any]], args: argparse.Namespace, recipe: Recipe) -> int:
    """Calls `start`, which runs the recipe, and tells how that ended. Returns the exit code."""
    from flows.run.executor import RecipeFailed
    from flows.run.gates.gatekeeper import GateStopped
    from tasks.trainer.processes import OUT_OF_MEMORY

    try:
        result = start()
    except RecipeFailed as failed:
        if args.json:
            print(json.dumps(failed.result))
        if isinstance(failed.cause, GateStopped):
            return _stopped(failed.cause, args.arguments)
        kind = "error" if isinstance(failed.cause, InputError) else "failed"
        why = OUT_OF_MEMORY if isinstance(failed.cause, MemoryError) else _one_line(failed.cause)
        print(f"{kind}: {failed.stage}: {why}", file=sys.stderr)
        return 2 if isinstance(failed.cause, InputError) else 1
    _print_table(result)
    print_text(f"report: {result['report']}", sys.stderr)
    where = f"MLflow experiment {recipe.name!r}, run {result['run_id']}; everything lies in {home()}"
    print_text(where, sys.stderr)
    if args.json:
        print(json.dumps(result))
    return 0


def _stopped(gate: Any, arguments: Sequence[str]) -> int:
    if gate.can_be_approved:
        # Not folded, so that it can be copied.
        print(f"to go on: {shlex.join(['r1', *arguments, '--approve', gate.gate])}", file=sys.stderr)
    print_text(f"stopped: {_one_line(gate)}", sys.stderr)
    return 1


def _one_line(error: BaseException) -> str:
    return masked(" ".join(str(error).split())) or type(error).__name__


def _print_table(result: dict[str, Any]) -> None:
    if not result["checkpoints"]:
        return
    from tasks.report.closing import WIDTH, closing_lines

    for line in closing_lines(result["checkpoints"], min(WIDTH, width(sys.stderr) or WIDTH)):
        print(line, file=sys.stderr)
    print(file=sys.stderr)
