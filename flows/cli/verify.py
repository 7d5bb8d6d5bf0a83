"""`r1 verify`: checks the store for consistency, also with MLflow and Prefect, and repairs what it can."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flows.cli.terminal import print_text
from flows.home import home, read_state, store, tracking

if TYPE_CHECKING:
    from tasks.store.backend import Flaw


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("verify", help="what is damaged, missing, left over, or running without a process")
    command.add_argument("--repair", action="store_true", help="set damaged artifacts aside, end dead runs, clean up")
    command.add_argument(
        "--quick", action="store_true", help="read only files that changed since they were compared with their hashes"
    )
    command.add_argument("--json", action="store_true", help="print the findings as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints what is wrong, and repairs it with --repair. Returns 0 if nothing wrong is left, else 1."""
    found: list[dict[str, Any]] = []
    for finding in findings(quick=args.quick):
        done = finding.repair() if args.repair and finding.repair else ""
        entry = {"kind": finding.kind, "what": finding.what, "said": finding.said, "repaired": done}
        found.append(entry)
        end = f"; {done}" if done else f"; {finding.remedy}" if finding.remedy else ""
        line = f"{finding.kind:<8}  {finding.what}: {finding.said}{end}"
        print_text(line, sys.stderr if args.json else sys.stdout, indent=" " * 10)
    left = [entry for entry in found if not entry["repaired"]]
    if args.json:
        print(json.dumps({"home": str(home()), "findings": found, "left": len(left)}))
    if not found:
        print_text(f"nothing is wrong in {home()}", sys.stderr)
    elif left:
        remedy = "" if args.repair else "; `r1 verify --repair` mends what can be mended"
        print_text(f"{len(left)} wrong{remedy}", sys.stderr)
    else:
        print_text(f"{len(found)} mended; the next run makes again what was set aside", sys.stderr)
    return 1 if left else 0


def findings(*, quick: bool) -> Iterator[Flaw]:
    """Yields what is wrong in the store, in MLflow and in Prefect. Skips MLflow and Prefect if this home has never used
    them and no server is configured.

    Raises:
        InputError: a configured server does not answer.
    """
    from tasks.store.audit import audit
    from tasks.tracking.audit import audit_tracking

    digests = yield from audit(store(), every_byte=not quick)
    record = tracking()
    if record.sqlite and not record.sqlite.exists():
        return
    yield from audit_tracking(record, digests)
    with _prefect() as local:
        if local is not None:
            from flows.installation.lost_runs import audit_prefect

            yield from audit_prefect(record, local=local)


@contextlib.contextmanager
def _prefect() -> Iterator[bool | None]:
    """Provides a Prefect server: the configured one, or else one for the home's database. Yields whether all its
    workers are on this machine, or None if there is no server to ask."""
    from flows.prefect_server import keeps_runs, prefect_server

    if not keeps_runs() and not (home() / "prefect" / "prefect.db").exists():
        yield None
        return
    with prefect_server(home() / "logs"):
        from prefect.settings import PREFECT_API_URL

        yield not keeps_runs() or read_state(home()).get("prefect") == PREFECT_API_URL.value()
