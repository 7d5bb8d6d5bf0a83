"""`r1 promote`: sets an alias in the model registry by hand."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from flows.home import store, tracking
from flows.stage_contract.references import artifact
from grpo.errors import InputError
from tasks.store.manifest import Manifest
from tasks.tracking.models.registry import CHAMPION
from tasks.tracking.names import registered_name


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("promote", help="give a checkpoint an alias in MLflow's model registry")
    command.add_argument("reference", metavar="REF", help="a key, a digest, latest:STAGE, RUN:STAGE, or NAME@RECIPE")
    command.add_argument("--alias", default=CHAMPION, help=f"default: {CHAMPION}")
    command.add_argument("--recipe", help="the registered model, where several have this checkpoint")


def run(args: argparse.Namespace) -> int:
    """Sets an alias in MLflow's model registry. Returns the exit code."""
    if not re.fullmatch(r"[\w-]+", args.alias) or re.fullmatch(r"latest|v\d+", args.alias):
        raise InputError(f"--alias {args.alias}: give letters, digits, - and _; latest and v1 are MLflow's own")
    manifest = store().check_here(artifact(args.reference))
    recipe = _recipe_of(manifest, args.recipe)
    version = tracking().models.set_alias_now(recipe, args.alias, manifest)
    print(f"{args.alias}@{recipe} is {manifest.stage} {manifest.key[:12]}, version {version}", file=sys.stderr)
    return 0


def _recipe_of(manifest: Manifest, asked: str | None) -> str:
    """The recipe whose registered model gets the alias: `asked`, or the only one that has the checkpoint."""
    record = tracking()
    recipes = record.models.recipes_with(manifest)
    if asked is not None:  # a name that is mistyped would become a new registered model
        known = {*recipes, *record.recipes()}
        if asked not in known and registered_name(asked) not in known:
            raise InputError(f"--recipe {asked}: no recipe of this name has run; there are {', '.join(sorted(known))}")
        return asked
    if not recipes:
        raise InputError(f"{manifest.stage} {manifest.key[:12]} is no registered model; give a checkpoint")
    if len(recipes) > 1:
        raise InputError(f"{manifest.key[:12]}: is in {len(recipes)} registered models; give --recipe {recipes[0]}")
    return recipes[0]
