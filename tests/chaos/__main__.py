"""`make chaos`: tries of every kind of fault under a seed, a journal of the outcomes, and docs/reliability.md.

python -m tests.chaos --tries 5                   five tries a kind; goes on where an earlier run was stopped
python -m tests.chaos --kinds checkpoint --again  kinds with this word in their name, once more
python -m tests.chaos --list
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.chaos.faults.all import KINDS
from tests.chaos.faults.registry import Fault
from tests.chaos.homes import Homes
from tests.chaos.servers import Server
from tests.chaos.table import page, read, table
from tests.chaos.trial import WRONG, Trial, clean, finish
from tests.chaos.zygote import Zygote
from tests.support.r1 import ROOT


def attempt(homes: Homes, kind: Fault, number: int, seed: int) -> dict[str, object]:
    """One try. Returns its record."""
    chance = random.Random(f"{seed} {kind.name} {number}")
    target, template = kind.choose(chance)
    if kind.own_server:
        homes = Homes(homes.folder)
    homes.lay(template)
    trial = Trial(homes, target, chance)
    began = time.monotonic()
    try:
        first = kind.act(trial)
        struck = first.code != 0 if trial.struck is None else trial.struck
        outcome, why = finish(trial, first)
    finally:
        clean(trial)
    place = {"kind": kind.name, "number": number, "seed": seed, "target": target, "template": template}
    took = {"seconds": round(time.monotonic() - began, 1), "notes": trial.notes, "commit": commit()}
    return {**place, "outcome": outcome, "struck": struck, "why": why, **took}


def commit() -> str:
    """The commit of the working tree, with + if files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "grpo", "tasks", "flows") else "")


def machine() -> str:
    """In words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{os.cpu_count()} cores of {platform.machine()}, {memory:.0f} GB, Python {platform.python_version()}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--tries", type=int, default=5, help="tries of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="words; kinds with one of them in their name, separated by commas")
    parser.add_argument("--again", action="store_true", help="tries that the journal has, too")
    parser.add_argument("--list", action="store_true", help="print the kinds")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/chaos", help="templates, the home, the journal")
    parser.add_argument("--write", type=Path, help="the page to write the table into")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what was started is ended
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell, children would ignore it
    words = args.kinds.split(",")
    kinds = [kind for kind in KINDS.values() if any(word in kind.name for word in words)]
    if args.list:
        print("\n".join(kind.name for kind in kinds))
        return 0
    journal = args.folder.absolute() / "journal.jsonl"
    homes = Homes(args.folder.absolute() / "homes")
    known = {(r["kind"], r["number"]) for r in read(journal) if r["seed"] == args.seed}
    plan = [(kind, number) for number in range(args.tries) for kind in kinds]
    if not args.again:
        plan = [(kind, number) for kind, number in plan if (kind.name, number) not in known]
    server = None
    if plan:
        homes.build()
        server = Server("prefect", args.folder.absolute() / "server", args.folder.absolute() / "prefect.log")
        homes.prefect = server.url
        homes.zygote = Zygote(homes.environment())
    try:
        run(homes, plan, args.seed, journal)
    finally:
        if server is not None and homes.zygote is not None:
            homes.zygote.close()
            server.stop()
    records = [record for record in read(journal) if record["seed"] == args.seed]
    print(table(records))
    if args.write:
        page(args.write, records, KINDS, f"python -m tests.chaos --tries {args.tries} --seed {args.seed}", machine())
    return 1 if any(record["outcome"] == WRONG for record in records) else 0


def run(homes: Homes, plan: list[tuple[Fault, int]], seed: int, journal: Path) -> None:
    """The tries of the plan, each a line of the journal."""
    for kind, number in plan:
        if missing := [program for program in kind.needs if shutil.which(program) is None]:
            print(f"left out: {kind.name} needs {', '.join(missing)}", flush=True)
            continue
        try:
            record = attempt(homes, kind, number, seed)
        except Exception as error:  # of the suite, not of what is tested
            print(f"no outcome: {kind.name} {number}: {error!r}", flush=True)
            continue
        with journal.open("a") as file:
            file.write(json.dumps(record) + "\n")
        aimed = "" if record["struck"] else "missed: "
        print(
            f"{record['outcome']:16}{record['seconds']:6} s  {aimed}{kind.name} {number}: {record['why']}", flush=True
        )


if __name__ == "__main__":
    raise SystemExit(main())
