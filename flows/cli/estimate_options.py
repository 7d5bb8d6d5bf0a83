"""What `r1 plan` can be told about the estimate; apart from flows/cli/plan_estimate.py, which takes a second to
load."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(command: argparse.ArgumentParser) -> None:
    command.add_argument("--estimate", action="store_true", help="time, memory, disk and network of each stage")
    command.add_argument("--device", metavar="NAME", help="H200, H100, A100 or cpu; default: what this machine has")
    command.add_argument("--config", type=Path, metavar="FILE", help="config.json of the base model")
    command.add_argument("--calibrate", action="store_true", help="measure this machine's processor first")
    command.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="another number for what no setting says: prompt_tokens, memory, ... (repeatable; a wrong one lists all)",
    )
