"""Options of `r1 run` and `r1 plan`. Keeps imports light, because `r1 --help` loads this module."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flows.recipe.pipeline_names import PIPELINE_NAMES
from grpo.errors import InputError

if TYPE_CHECKING:
    from flows.run.plan import StageSelection


def add_selection(command: argparse.ArgumentParser) -> None:
    """Adds the options that `r1 run` and `r1 plan` share: the recipe, its overrides, and the selection of stages."""
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
        help="take this artifact instead of making it: a key, a digest, latest, RUN:STAGE of a run in MLflow, or a "
        "path (begins with . / ~)",
    )


def add_estimate(command: argparse.ArgumentParser) -> None:
    """Adds the estimate options of `r1 plan`."""
    command.add_argument("--estimate", action="store_true", help="time, memory, disk and network of each stage")
    command.add_argument(
        "--device", metavar="NAME", help="H200, H100, A100 or cpu; default: the recipe's, or what this machine has"
    )
    command.add_argument("--config", type=Path, metavar="FILE", help="config.json of the base model")
    command.add_argument("--calibrate", action="store_true", help="measure this machine's processor first")
    command.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="another number for what no setting says: prompt_tokens, memory, ... (repeatable; a wrong one lists all)",
    )


def selection_of(args: argparse.Namespace) -> StageSelection:
    """The stages that parsed arguments select."""
    from flows.run.plan import StageSelection

    inputs = {}
    for pair in args.input:
        name, equals, reference = pair.partition("=")
        if not equals:
            raise InputError(f"--input {pair}: write STAGE=REF")
        inputs[name] = reference
    return StageSelection(args.start, args.only, args.force, inputs, getattr(args, "approve", ()))
