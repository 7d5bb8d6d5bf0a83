"""The command `r1 data`."""

from __future__ import annotations

import argparse
from typing import Any

from flows.home import store
from grpo.errors import InputError


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("data", help="a data set: what was kept, what was dropped and why, samples")
    command.add_argument("reference", metavar="DIGEST", help="the beginning of a key or digest; sft_data: the newest")
    command.add_argument("--reason", metavar="NAME", help="only samples of this outcome, in full: kept, or a filter")
    command.add_argument("--samples", type=int, default=1, metavar="N", help="samples of each outcome (default: 1)")
    command.add_argument("--json", action="store_true", help="print all of it as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints a data set's filters and samples. Returns the exit code."""
    from rich.console import Console

    from tasks.sft_data import terminal_view as data_view

    if args.samples < 0:
        raise InputError(f"--samples {args.samples}: give 0 or more")
    view = data_view.look(data_view.find(store(), args.reference), args.reason, args.samples)
    if args.json:
        print(data_view.to_json(view))
    else:
        data_view.show(view, Console(), whole=args.reason is not None)
    return 0
