"""The commands `r1 stages` and `r1 show`: the artifacts in the store, and their lineage."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from flows.home import home, store


def add(commands: Any) -> None:
    """Adds `stages` and `show` to the parser."""
    commands.add_parser("stages", help="what exists")
    command = commands.add_parser("show", help="one artifact: what it is and where it came from")
    command.add_argument("key", help="the beginning of a key or digest, latest:STAGE, or RUN:STAGE")


def stages(args: argparse.Namespace) -> int:
    """`r1 stages`: lists the store's artifacts. Returns the exit code."""
    from tasks.store.stale import stale_reasons

    known = store().list()
    reasons = stale_reasons(store(), known)
    if not known:
        print(f"nothing in {home()} yet; `r1 run tiny` makes the first artifacts", file=sys.stderr)
        return 0
    for m in known:
        size = sum(entry["size"] for entry in m.files.values()) / 1e6
        seed = m.config.get("seed", "-")
        line = f"{m.created[:19]}  {m.stage:<16} {m.key[:12]}  seed {seed:<4} {size:8.1f} MB {m.seconds:7.0f} s"
        print(f"{line}  stale: {reasons[m.key]}" if m.key in reasons else line)
    return 0


def show(args: argparse.Namespace) -> int:
    """`r1 show`: an artifact and its inputs. Returns the exit code."""
    from flows.stages.references import artifact
    from tasks.store.stale import stale_reasons

    manifest = artifact(args.key)
    known = {m.digest: m for m in store().list()}
    print(json.dumps({**manifest.to_dict(), "path": str(manifest.path)}, indent=2))
    print("\nMade from:")

    def lineage(m: Any, depth: int, seen: set[str]) -> None:
        for name, ref in m.inputs.items():
            again = " (above)" if ref.digest in seen else ""
            print(f"{'  ' * depth}{name}: {ref.path or (ref.key or '')[:12]}{again}")
            if ref.digest in known and not again:
                seen.add(ref.digest)
                lineage(known[ref.digest], depth + 1, seen)

    lineage(manifest, 1, set())
    if why_stale := stale_reasons(store(), known.values()).get(manifest.key):
        print(f"\nStale: {why_stale}")
    return 0
