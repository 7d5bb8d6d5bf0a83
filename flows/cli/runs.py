"""The command `r1 runs`: lists the recipe runs in MLflow."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime
from typing import Any

from flows.cli.terminal import print_row
from flows.home import tracking
from grpo.errors import InputError
from grpo.secret_values import masked
from tasks.tracking.tags import FAILED_TAG, FLOW_TAG, OVERRIDES_TAG, RECIPE_TAG, SEED_TAG


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("runs", help="the recipe runs, newest first")
    command.add_argument("--recipe", metavar="NAME", help="only runs of this recipe")
    command.add_argument("--last", type=int, default=20, metavar="N", help="as many at most (default: 20)")
    command.add_argument("--json", action="store_true", help="print the runs as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Lists the recipe runs. Returns the exit code."""
    from flows.progress import duration

    if args.last < 1:
        raise InputError(f"--last {args.last}: give 1 or more")
    record = tracking()
    there = record.reader.recipe_runs() if not record.sqlite or record.sqlite.exists() else []
    runs = [run for run in there if args.recipe in (None, run.tags.get(RECIPE_TAG))][: args.last]
    if args.json:
        print(json.dumps({"tracking": masked(record.uri), "runs": [_values(run) for run in runs]}))
        return 0
    if not runs:
        named = f" of recipe {args.recipe!r}" if args.recipe else ""
        print(f"no run{named} yet; `r1 run {args.recipe or 'tiny'}` makes the first", file=sys.stderr)
        return 0
    recipes = max(len(run.tags.get(RECIPE_TAG, "")) for run in runs)
    flows = max(len(run.tags.get(FLOW_TAG, "")) for run in runs)
    for run in runs:
        of = _values(run)
        took = duration(of["seconds"]) if of["seconds"] is not None else ""
        status = f"failed at {of['failed']}" if of["failed"] else str(of["status"]).lower()
        began = datetime.fromtimestamp(run.began).isoformat(" ", "minutes")
        line = f"{run.id[:8]}  {began}  {of['recipe'] or '':<{recipes}}  {of['flow'] or '':<{flows}}  seed {of['seed']}"
        print_row(f"{line}  {took:>6}  {status:<8}  {' '.join(of['overrides'].split())}".rstrip())
    return 0


def _values(run: Any) -> dict[str, Any]:
    """A run as plain values. Times are seconds since 1970, durations seconds."""
    return {
        "id": run.id,
        "name": run.name,
        "recipe": run.tags.get(RECIPE_TAG),
        "flow": run.tags.get(FLOW_TAG),
        "seed": run.tags.get(SEED_TAG),
        "overrides": run.tags.get(OVERRIDES_TAG, ""),
        "status": run.status,
        "failed": run.tags.get(FAILED_TAG),
        "began": run.began,
        "seconds": run.ended - run.began if run.ended else None,
    }
