"""The commands `r1 stages` and `r1 show`: artifacts in the store, and their lineage."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from flows.cli.terminal import print_row
from flows.home import home, store


def add(commands: Any) -> None:
    """Adds `stages` and `show` to the parser."""
    command = commands.add_parser("stages", help="what exists")
    command.add_argument("--json", action="store_true", help="print the artifacts as one JSON object")
    command = commands.add_parser("show", help="one artifact: what it is and where it came from")
    command.add_argument("key", help="the beginning of a key or digest, latest:STAGE, or RUN:STAGE")
    command.add_argument("--json", action="store_true", help="print its manifest as one JSON object, and nothing else")


def stages(args: argparse.Namespace) -> int:
    """`r1 stages`: lists the store's artifacts. Returns the exit code."""
    from tasks.store.stale import stale_reasons

    known = store().list()
    reasons = stale_reasons(store(), known)
    if args.json:
        listed = [
            {"stage": m.stage, "key": m.key, "digest": m.digest, "created": m.created, "seconds": m.seconds}
            | {"seed": m.config.get("seed"), "bytes": _bytes(m), "stale": reasons.get(m.key), "path": m.location}
            for m in known
        ]
        print(json.dumps({"home": str(home()), "artifacts": listed}))
        return 0
    if not known:
        print(f"nothing in {store().backend.place} yet; `r1 run tiny` makes the first artifacts", file=sys.stderr)
        return 0
    for m in known:
        seed, size = m.config.get("seed", "-"), _bytes(m) / 1e6
        line = f"{m.created[:19]}  {m.stage:<16} {m.key[:12]}  seed {seed:<4} {size:8.1f} MB {m.seconds:7.0f} s"
        print_row(f"{line}  stale: {reasons[m.key]}" if m.key in reasons else line)
    return 0


def show(args: argparse.Namespace) -> int:
    """`r1 show`: shows an artifact and its inputs. Returns the exit code."""
    from flows.stage_contract.references import artifact
    from tasks.store.stale import stale_reasons

    manifest = artifact(args.key)
    known = {m.digest: m for m in store().list()}
    stale = stale_reasons(store(), known.values()).get(manifest.key)
    if args.json:
        print(json.dumps({**manifest.to_dict(), "path": manifest.location, "stale": stale}, indent=2))
        return 0
    for line in [*_description(manifest, stale), *_lineage(manifest, known, 1, set())]:
        print_row(line)
    return 0


def _description(m: Any, stale: str | None) -> Iterator[str]:
    from flows.progress import duration

    yield f"{m.stage}  {m.key}"
    steps = f" in {m.steps_completed:,} steps" if m.steps_completed is not None else ""
    yield f"  made {m.created[:19]}, in {duration(m.seconds)}{steps}"
    yield f"  attempt {m.attempt}, stage version {m.stage_version}, digest {m.digest}"
    yield f"  {len(m.files)} files, {_bytes(m) / 1e6:.1f} MB, in {m.location}"
    if m.origin:
        yield f"  by {', '.join(f'{name} {value}' for name, value in m.origin.items())}"
    if m.mlflow_run_id:
        yield f"  MLflow run {m.mlflow_run_id}"
    if stale:
        yield f"  stale: {stale}"
    for title, values in (("Counts", m.counts), ("Metrics", m.metrics), ("Configuration", dict(_flat(m.config)))):
        if values:
            yield f"\n{title}:"
            yield from (f"  {name} = {_value(value)}" for name, value in values.items())
    yield "\nMade from:"
    if not m.inputs:
        yield "  its configuration alone"


def _lineage(m: Any, known: dict[str, Any], depth: int, seen: set[str]) -> Iterator[str]:
    for name, ref in m.inputs.items():
        again = " (above)" if ref.digest in seen else ""
        yield f"{'  ' * depth}{name}: {ref.path or (ref.key or '')[:12]}{again}"
        if ref.digest in known and not again:
            seen.add(ref.digest)
            yield from _lineage(known[ref.digest], known, depth + 1, seen)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and values of nested settings. Lists of plain values are not split."""
    if isinstance(value, dict) and (value or not path):
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for number, item in enumerate(value):
            yield from _flat(item, f"{path}.{number}")
    else:
        yield path, value


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _bytes(m: Any) -> int:
    return sum(entry["size"] for entry in m.files.values())
