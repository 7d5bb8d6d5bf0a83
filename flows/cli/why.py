"""The command `r1 why`: why two artifacts of a stage have different keys (fields, inputs, version)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from flows.cli.terminal import print_row
from flows.home import store
from flows.stage_contract.references import artifact
from grpo.errors import InputError
from tasks.store.diff import Ingredients, differences
from tasks.store.manifest import Manifest

NOTHING = "nothing that changes the result differs"
"""Said of two keys of which at least one is an earlier version's, which hashed more settings."""


def why(old: Manifest, new: Manifest, known: Mapping[str, Manifest]) -> list[dict[str, Any]]:
    """The differences between two artifacts, as plain values. A difference in an input has its own differences under
    "why".

    `known`: digest -> manifest, for artifacts whose inputs can be examined.

    Raises:
        InputError: the artifacts belong to different stages.
    """
    if old.stage != new.stage:
        raise InputError(f"{old.key[:12]} is of stage {old.stage!r}, {new.key[:12]} of {new.stage!r}; give two of one")
    return _why(old, new, known, set())


def _why(
    old: Manifest, new: Manifest, known: Mapping[str, Manifest], seen: set[tuple[str, str]]
) -> list[dict[str, Any]]:
    reasons: list[dict[str, Any]] = []
    for difference in differences(Ingredients.of(old), Ingredients.of(new)):
        entry: dict[str, Any] = {"kind": difference.kind, "name": difference.name, "said": str(difference)}
        if difference.kind != "input":
            reasons.append({**entry, "old": difference.old, "new": difference.new})
            continue
        pair = [ref and ref.digest for ref in (difference.old, difference.new)]
        entry |= {"old": pair[0], "new": pair[1]}
        makers = [known.get(digest) for digest in pair]
        if makers[0] and makers[1] and makers[0].stage == makers[1].stage and (pair[0], pair[1]) not in seen:
            seen.add((pair[0], pair[1]))
            entry["why"] = _why(makers[0], makers[1], known, seen)
            if makers[0].key == makers[1].key:
                entry["said"] += f": attempt {makers[1].attempt} at the same key made other bytes"
            elif not entry["why"]:
                entry["said"] += f": {NOTHING}"
        reasons.append(entry)
    return reasons


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("why", help="why two artifacts of a stage differ: fields, inputs, versions")
    command.add_argument("old", metavar="OLD", help="the beginning of a key or digest, latest:STAGE, RUN:STAGE")
    command.add_argument("new", metavar="NEW", help="the same, of the same stage")
    command.add_argument("--json", action="store_true", help="print the differences as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints why two artifacts differ. Returns the exit code."""
    old, new = artifact(args.old), artifact(args.new)
    reasons = why(old, new, {manifest.digest: manifest for manifest in store().list()})
    if args.json:
        print(json.dumps({"old": old.key, "new": new.key, "differences": reasons}))
        return 0
    print_row(f"{old.stage}: {old.key[:12]} ({old.created[:16]}) -> {new.key[:12]} ({new.created[:16]})")
    if not reasons and old.key != new.key:
        print_row(f"  {NOTHING}")
    elif not reasons:
        print_row(
            "  nothing differs" + ("" if old.digest == new.digest else f": attempt {new.attempt} made other bytes")
        )
    _show(reasons, 1)
    return 0


def _show(reasons: list[dict[str, Any]], depth: int) -> None:
    for entry in reasons:
        print_row("  " * depth + entry["said"])
        _show(entry.get("why", []), depth + 1)
