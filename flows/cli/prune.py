"""`r1 prune`: removes artifacts that no kept run needs, and old runs that made none of the kept artifacts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from flows.cli.terminal import print_row, print_text
from flows.home import home, store, tracking
from grpo.errors import InputError
from tasks.store.manifest import Manifest

DAY_S = 86400.0


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("prune", help="what no kept run needs, and its removal")
    command.add_argument("--yes", action="store_true", help="remove it; without this it is only listed")
    command.add_argument(
        "--keep", action="append", default=[], metavar="REF", help="keep this artifact and what it was made from, too"
    )
    command.add_argument(
        "--unfinished", action="store_true", help="remove interrupted attempts, too, which could be continued"
    )
    command.add_argument(
        "--runs-older-than",
        type=float,
        metavar="DAYS",
        help="delete runs in MLflow, too, that ended so long ago and made no artifact that stays, with their reports, "
        "and sampled completions that no run has used since",
    )
    command.add_argument("--json", action="store_true", help="print what is removed as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Lists what can be removed, and removes it with --yes. Returns the exit code."""
    import shutil

    from tasks.store.prune import plan_pruning, remove_artifact, remove_work, size_of

    if args.runs_older_than is not None and not args.runs_older_than > 0:
        raise InputError(f"--runs-older-than {args.runs_older_than:g}: give days, more than 0")
    named, in_use = _kept(args.keep)
    place = store()
    pruning = plan_pruning(place, named, in_use)
    out = sys.stderr if args.json else sys.stdout
    removed: list[dict[str, Any]] = []

    def row(what: str, size: int, done: bool) -> None:
        if args.yes and not done:
            print_row(f"{'in use':>10}  {what}", out)
            return
        removed.append({"what": what, "bytes": size})
        print_row(f"{size / 1e6:7.1f} MB  {what}", out)

    for manifest in pruning.artifacts:
        size = sum(entry["size"] for entry in manifest.files.values())
        what = f"{manifest.created[:19]}  {manifest.stage} {manifest.key[:12]}, attempt {manifest.attempt}"
        row(what, size, args.yes and remove_artifact(place, manifest))
    for work in pruning.unfinished if args.unfinished else []:
        row(f"unfinished {work.name}", size_of(work), args.yes and remove_work(place, work))
    for folder in pruning.folders:
        row(f"{folder.name}/", size_of(folder), True)
        if args.yes:
            shutil.rmtree(folder, ignore_errors=True)
    removable = pruning.unfinished if args.unfinished and not args.yes else []  # with --yes, they are gone by now
    if args.runs_older_than is not None and (shards := _old_samples(args.runs_older_than, removable)):
        row(f"samples, {len(shards)} shards unused for so long", sum(map(size_of, shards)), True)
        for folder in shards if args.yes else []:
            shutil.rmtree(folder, ignore_errors=True)
    if args.yes:
        _forget_models(pruning.artifacts)
    runs = [] if args.runs_older_than is None else _old_runs(args, pruning.artifacts, named, out)
    total = sum(entry["bytes"] for entry in removed)
    kept = sum(pruning.kept.values())
    if args.json:
        values = {"home": str(home()), "removed": removed if args.yes else [], "removable": removed, "bytes": total}
        print(json.dumps({**values, "runs": runs, "kept": pruning.kept}))
    if pruning.unfinished and not args.unfinished:
        size = sum(map(size_of, pruning.unfinished))
        print_text(
            f"{len(pruning.unfinished)} unfinished, {size / 1e6:.1f} MB: the same commands would continue them; "
            "--unfinished removes them, too",
            sys.stderr,
        )
    verb = "freed" if args.yes else "would free"
    remedy = "" if args.yes or not removed + runs else "; `r1 prune --yes` removes it"
    print_text(f"{verb} {total / 1e6:.1f} MB, {total} bytes; {kept} artifacts stay{remedy}", sys.stderr)
    return 0


def _old_samples(days: float, removable: list[Path]) -> list[Path]:
    """Folders of completions that rejection sampling has made, and that no run has used for so many days. None if an
    attempt at the stage may need them, because it runs or can be continued, but for the `removable` ones."""
    from flows.stages.sft_data import SAMPLES, STAGE
    from tasks.sft_data.shards import unused

    if {*home().glob(f"work/{STAGE.name}-*")} - {*removable}:
        return []
    return unused(home() / SAMPLES, time.time() - days * DAY_S)


def _old_runs(
    args: argparse.Namespace, removed: list[Manifest], named: dict[str, list[str]], out: TextIO
) -> list[dict[str, Any]]:
    """Lists runs that are older than the given age and made no artifact that stays. With --yes, deletes them and their
    report pages. `removed`: artifacts that are being removed or already gone."""
    record = tracking()
    if record.sqlite and not record.sqlite.exists():
        return []
    from flows.run.report import default_path
    from tasks.tracking.audit import delete_runs, old_runs

    gone = {(manifest.key, manifest.attempt) for manifest in removed}
    stay = {m.digest for m in store().list() if (m.key, m.attempt) not in gone}
    runs = old_runs(record, time.time() - args.runs_older_than * DAY_S, stay.union(*named.values()))
    for run in runs:
        ended = datetime.fromtimestamp(run.ended, UTC).isoformat()[:19]
        print_row(f"{'run':>10}  {ended}  {run.id[:12]}, {len(run.stages)} stages: {run.name}", out)
    if args.yes:
        delete_runs(record, runs)
        for run in runs:
            default_path(run.id).unlink(missing_ok=True)
    if runs:
        verb = "deleted" if args.yes else "would delete"
        print_text(f"{verb} {len(runs)} runs in MLflow; `mlflow gc` then frees their space", sys.stderr)
    return [{"id": run.id, "name": run.name, "stages": len(run.stages)} for run in runs]


def _forget_models(manifests: list[Manifest]) -> None:
    """Removes the MLflow files of models whose artifact is gone. They are hard links and would keep the space in
    use."""
    there = {manifest.digest for manifest in store().list()}
    record = tracking()
    if record.sqlite and not record.sqlite.exists():
        return
    for manifest in manifests:
        if manifest.digest not in there and "config.json" in manifest.files:
            record.models.remove_files(manifest)


def _kept(references: list[str]) -> tuple[dict[str, list[str]], set[str]]:
    """Digests to keep by reason, and digests that live runs use.

    Raises:
        InputError: a reference names nothing, or MLflow, which knows the promoted models, cannot be reached.
    """
    from flows.stage_contract.references import artifact

    named = {"named": [artifact(reference).digest for reference in references]}
    record = tracking()
    if record.sqlite and not record.sqlite.exists():  # this home has never recorded a run
        return named, set()
    from tasks.tracking.audit import digests_in_use, promoted

    return {**named, "promoted": list(promoted(record).values())}, digests_in_use(record)
