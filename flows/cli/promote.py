"""The model registry in the recipes: aliases that move when a run ends, and `r1 promote`, which moves one by hand."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from flows.home import store, tracking
from flows.stages.references import artifact
from grpo.errors import InputError
from tasks.store.store import Manifest
from tasks.tracking.client import Tracking
from tasks.tracking.registry import CHAMPION, recipes_with


def move_aliases(
    record: Tracking, recipe: str, made: Mapping[str, str], stages: Sequence[str], gates: Sequence[Mapping[str, Any]]
) -> None:
    """At the end of a run: each checkpoint that it made or reused has its name, dev1 or r1 say, as an alias; the last
    policy of the recipe becomes the champion if the run had gates and all of them passed by themselves.

    `made`: stage -> key, of this run; `stages`: all of its graph, in order; `gates`: as the run's result has them.
    """
    from flows.stages.evaluate import CHECKPOINTS, checkpoints

    for stage, name in checkpoints(made).items():
        record.set_alias(recipe, name, store().resolve(made[stage]))
    policies = [stage for stage in stages if stage in CHECKPOINTS]
    taught = len(checkpoints(stages)) > len(policies)  # students: their teacher is no champion for that
    passed = bool(gates) and all(gate["status"] == "passed" for gate in gates)
    if passed and not taught and policies[-1] in made:
        record.set_alias(recipe, CHAMPION, store().resolve(made[policies[-1]]))


def add(commands: Any) -> None:
    command = commands.add_parser("promote", help="give a checkpoint an alias in MLflow's model registry")
    command.add_argument("reference", metavar="REF", help="a key, a digest, latest:STAGE, RUN:STAGE, or NAME@RECIPE")
    command.add_argument("--alias", default=CHAMPION, help=f"default: {CHAMPION}")
    command.add_argument("--recipe", help="the registered model, where several have this checkpoint")


def run(given: argparse.Namespace) -> int:
    if not re.fullmatch(r"[\w-]+", given.alias) or re.fullmatch(r"latest|v\d+", given.alias):
        raise InputError(f"--alias {given.alias}: give letters, digits, - and _; latest and v1 are MLflow's own")
    manifest = artifact(given.reference)
    recipe = given.recipe or _recipe_of(manifest)
    version = tracking().set_alias_now(recipe, given.alias, manifest)
    print(f"{given.alias}@{recipe} is {manifest.stage} {manifest.key[:12]}, version {version}", file=sys.stderr)
    return 0


def _recipe_of(manifest: Manifest) -> str:
    recipes = recipes_with(manifest, tracking())
    if not recipes:
        raise InputError(f"{manifest.stage} {manifest.key[:12]} is no registered model; give a checkpoint")
    if len(recipes) > 1:
        raise InputError(f"{manifest.key[:12]}: is in {len(recipes)} registered models; give --recipe {recipes[0]}")
    return recipes[0]
