"""The command `r1 report`: writes one recipe run as an HTML page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from flows.home import store, tracking
from grpo.errors import InputError
from tasks.paths import expanded


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("report", help="one run as one HTML page that opens offline")
    command.add_argument("run", metavar="RUN", help="the beginning of an MLflow run id, latest, or latest~N")
    command.add_argument("--out", type=Path, metavar="FILE", help="default: reports/RUN.html in the home folder")


def run(args: argparse.Namespace) -> int:
    """Writes a run's report page. Returns the exit code."""
    from flows.run.report import default_path, write
    from tasks.tracking.recipe_run import load_run

    record = tracking()
    loaded = load_run(record.reader, store(), record.reader.find(args.run))
    path = expanded(args.out or default_path(loaded.run.id))
    try:
        write(record, loaded, path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give --out a file in a folder that can be written") from None
    print(path)
    if loaded.run.status == "RUNNING":
        print("the run has not ended; this is what is there of it", file=sys.stderr)
    return 0
