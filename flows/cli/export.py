"""`r1 export`: writes a checkpoint or a data set of the store in Hugging Face's form, to a folder or to the hub."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from flows.home import home, store, tracking
from flows.stage_contract.references import artifact
from grpo.errors import InputError
from tasks.paths import expanded

DATA_SETS = {
    "problems": {"train": "train.parquet", "validation": "validation.parquet", "test": "held_out.parquet"},
    "cold_start_data": {"train": "examples/*.parquet"},
    "sft_data": {"train": "examples/train/*.parquet", "validation": "examples/validation/*.parquet"},
}
"""Stages whose artifact is a data set -> its splits and their files."""


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("export", help="a checkpoint or a data set as a Hugging Face folder, or to the hub")
    command.add_argument(
        "reference", metavar="REF", help="a key, a digest, latest:STAGE, RUN:STAGE, champion, NAME@RECIPE"
    )
    command.add_argument("folder", metavar="FOLDER", type=Path, nargs="?", help="a new or an empty folder")
    command.add_argument(
        "--licence", "--license", metavar="ID", help="as the hub names it, apache-2.0 say (default: unknown)"
    )
    command.add_argument("--push", metavar="OWNER/NAME", help="upload to this repository of the hub instead")
    command.add_argument("--revision", metavar="BRANCH", help="of the repository (default: main)")
    command.add_argument("--public", action="store_true", help="a repository that is new is public, not private")
    command.add_argument("--dry-run", action="store_true", help="list what would be written, and write nothing")


def run(args: argparse.Namespace) -> int:
    """Writes an artifact as a Hugging Face folder, or uploads it. Returns the exit code."""
    from tasks.export.folder import check_folder, export
    from tasks.export.hub import check_name

    if (args.folder is None) == (args.push is None):
        raise InputError("give a FOLDER, or --push OWNER/NAME")
    if args.push is None and (args.revision or args.public):
        raise InputError("--revision and --public are for --push")
    if args.licence is not None and not re.fullmatch(r"[a-z0-9.-]+", args.licence):
        raise InputError(f"--licence {args.licence}: give the hub's name of it, in lower case: apache-2.0, mit, other")
    if args.push is not None:
        check_name(args.push)
    else:
        folder = expanded(args.folder)
        check_folder(folder)
    made = artifact(args.reference)
    name, card = _card(made, args)
    if args.dry_run:
        _list(made, card)
    elif args.push is not None:
        print(f"{name} {made.key[:12]} is at {_push(made, card, args)}", file=sys.stderr)
    else:
        export(made, card, folder, store())
        print(f"{name} {made.key[:12]} is in {folder}", file=sys.stderr)
    return 0


def _card(made: Any, args: argparse.Namespace) -> tuple[str, str]:
    """The artifact's name and its card."""
    from flows.cli.models import plain_template
    from flows.stages.evaluate import CHECKPOINTS, checkpoints
    from tasks.export.data_card import data_card
    from tasks.export.model_card import About, card, lineage
    from tasks.tracking.lineage import provenance

    # Named from its parent folder, because `datasets` does not accept "." as a name.
    place = args.push or f"./{expanded(args.folder).absolute().name}"
    if made.stage in DATA_SETS:
        return made.stage, data_card(made, DATA_SETS[made.stage], args.licence, place)
    name = checkpoints([made.stage]).get(made.stage)
    if name is None:
        known = ", ".join([*CHECKPOINTS, "student_NAME", *DATA_SETS])
        raise InputError(
            f"{args.reference}: stage {made.stage!r} makes no checkpoint and no data set; these do: {known}"
        )
    everything = store().list()
    evaluation, metrics = _newest_metrics(made, everything)
    made_from = lineage(made, {manifest.digest: manifest for manifest in everything})
    recipe_run = provenance(made.mlflow_run_id, tracking())
    template = plain_template(made)
    plain = template.read_text(encoding="utf-8") if template is not None and template.is_file() else None
    about = About(name, made, made_from, args.licence or "unknown", evaluation, metrics, recipe_run, place, plain)
    return name, card(about)


def _list(made: Any, card: str) -> None:
    """Prints the files and their sizes."""
    from tasks.export.folder import CARD

    sizes = {name: file["size"] for name, file in made.files.items()} | {CARD: len(card.encode())}
    for name in sorted(sizes):
        print(f"{sizes[name]:>16,}  {name}")
    print(f"{sum(sizes.values()):>16,}  bytes in {len(sizes)} files")


def _push(made: Any, card: str, args: argparse.Namespace) -> str:
    """Uploads the artifact through hard links to its files, without a copy."""
    from tasks.export.folder import link, write
    from tasks.export.hub import push
    from tasks.trainer.processes import process_name

    store().check(made, every_byte=True)
    pushes = home() / "pushes"
    pushes.mkdir(exist_ok=True)
    for left in pushes.iterdir():  # left by a push that was killed
        if process_name(int(left.name.partition("-")[0])) is None:
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f"{os.getpid()}-", dir=pushes) as parent:
        folder = Path(parent) / "files"
        write(made, card, folder, link)
        return push(folder, args.push, "dataset" if made.stage in DATA_SETS else "model", args.revision, args.public)


def _newest_metrics(checkpoint: Any, everything: list[Any]) -> tuple[Any, dict[str, Any]]:
    """The newest evaluation of the checkpoint, and its metrics."""
    from flows.stages.evaluate import checkpoints, read_table
    from tasks.evaluation.records import TABLE

    for manifest in reversed(everything):
        for stage, name in checkpoints(manifest.inputs).items():
            if manifest.inputs[stage].digest == checkpoint.digest and TABLE in manifest.files:
                return manifest, read_table(manifest)[name]
    return None, {}
