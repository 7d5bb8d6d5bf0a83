"""`r1 export`: a checkpoint of the store as a plain Hugging Face folder with a model card."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from flows.home import store, tracking
from flows.stages.references import artifact
from grpo.errors import InputError


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("export", help="a checkpoint as a plain Hugging Face folder with a model card")
    command.add_argument(
        "reference", metavar="REF", help="a key, a digest, latest:STAGE, RUN:STAGE, champion, NAME@RECIPE"
    )
    command.add_argument("folder", metavar="FOLDER", type=Path, help="a new or an empty folder")
    command.add_argument(
        "--licence", "--license", default="unknown", metavar="ID", help="as the hub names it, apache-2.0 say"
    )


def run(args: argparse.Namespace) -> int:
    """Writes a checkpoint as a Hugging Face folder. Returns the exit code."""
    from flows.stages.evaluate import CHECKPOINTS, checkpoints
    from tasks.export.folder import check_folder, export
    from tasks.export.model_card import About, lineage
    from tasks.tracking.lineage import provenance

    folder = args.folder.expanduser()
    if not re.fullmatch(r"[a-z0-9.-]+", args.licence):
        raise InputError(f"--licence {args.licence}: give the hub's name of it, in lower case: apache-2.0, mit, other")
    check_folder(folder)
    checkpoint = artifact(args.reference)
    name = checkpoints([checkpoint.stage]).get(checkpoint.stage)
    if name is None:
        known = ", ".join([*CHECKPOINTS, "student_NAME"])
        raise InputError(f"{args.reference}: stage {checkpoint.stage!r} makes no checkpoint; these do: {known}")
    everything = store().list()
    evaluation, metrics = _newest_metrics(checkpoint, everything)
    made_from = lineage(checkpoint, {manifest.digest: manifest for manifest in everything})
    recipe_run = provenance(checkpoint.mlflow_run_id, tracking())
    export(About(name, checkpoint, made_from, args.licence, evaluation, metrics, recipe_run), folder, store())
    print(f"{name} {checkpoint.key[:12]} is in {folder}", file=sys.stderr)
    return 0


def _newest_metrics(checkpoint: Any, everything: list[Any]) -> tuple[Any, dict[str, Any]]:
    """The newest evaluation of the checkpoint, and its metrics."""
    from flows.stages.evaluate import checkpoints, read_table
    from tasks.evaluation.records import TABLE

    for manifest in reversed(everything):
        for stage, name in checkpoints(manifest.inputs).items():
            if manifest.inputs[stage].digest == checkpoint.digest and (manifest.path / TABLE).is_file():
                return manifest, read_table(manifest)[name]
    return None, {}
