"""What `r1 run` and `r1 plan` can be told alike."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from flows.recipe.pipeline_names import PIPELINE_NAMES
from grpo.errors import InputError

if TYPE_CHECKING:
    from flows.run.plan import StageSelection


def add_selection(command: argparse.ArgumentParser) -> None:
    """What `r1 run` and `r1 plan` share: the recipe, its overrides, and which of its stages."""
    command.add_argument("recipe", help="a shipped recipe or a path that ends in .toml")
    command.add_argument(
        "--flow",
        choices=PIPELINE_NAMES,
        default="r1",
        type=lambda name: name.replace("-", "_"),
        help="which graph (default: r1); rlhf-ppo is rlhf_ppo",
    )
    command.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", dest="overrides")
    command.add_argument("--seed", type=int, help="replaces the recipe's seed")
    command.add_argument(
        "--from", dest="start", metavar="STAGE", help="begin here; earlier stages are taken as they are"
    )
    command.add_argument("--only", metavar="STAGE", help="this stage alone; its inputs are taken as they are")
    command.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="STAGE=REF",
        help="take this artifact: a key, a digest, latest, RUN:STAGE of a run in MLflow, or a path (begins with . / ~)",
    )


def selection_of(given: argparse.Namespace) -> StageSelection:
    from flows.run.plan import StageSelection

    inputs = {}
    for pair in given.input:
        name, equals, reference = pair.partition("=")
        if not equals:
            raise InputError(f"--input {pair}: write STAGE=REF")
        inputs[name] = reference
    return StageSelection(given.start, given.only, given.force, inputs, getattr(given, "approve", ()))
