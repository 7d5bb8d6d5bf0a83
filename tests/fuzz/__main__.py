"""`make fuzz`: every target sees new inputs, the targets of a group together for ten minutes and more; a journal of the
targets, and docs/measured/fuzz.md.

python -m tests.fuzz --minutes 10 --processes 2        goes on where an earlier run was stopped
python -m tests.fuzz --groups manifests,metrics --minutes 1 --write /tmp/fuzz.md
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from tests.chaos.__main__ import commit, machine
from tests.fuzz.log import GROUPS, group_of, name_of, page, read
from tests.support.r1 import ROOT

FUZZ = Path(__file__).parent


def targets() -> list[str]:
    """The node ids of all targets."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(FUZZ)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in said.splitlines() if "::" in line]


def feed(target: str, seconds: float, journal: Path) -> None:
    """One target for so long, in a process of its own, which adds a line to the journal."""
    variables = {"FUZZ_SECONDS": f"{seconds:g}", "FUZZ_JOURNAL": str(journal), "FUZZ_COMMIT": commit()}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", target]
    began = time.monotonic()
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    took = time.monotonic() - began
    print(f"{'passed' if done.returncode == 0 else 'FAILED'} {took:5.0f} s  {name_of(target)}", flush=True)
    if done.returncode:
        print(done.stdout[-4000:] + done.stderr[-1000:], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each group, shared by its targets")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="targets at once")
    parser.add_argument("--groups", default="", help="names with one of these words in them, separated by commas")
    parser.add_argument("--again", action="store_true", help="targets that the journal has, too")
    parser.add_argument("--journal", type=Path, default=ROOT / "build" / "fuzz" / "journal.jsonl")
    parser.add_argument("--write", type=Path, help="the page to write")
    args = parser.parse_args()
    journal: Path = args.journal.absolute()
    journal.parent.mkdir(parents=True, exist_ok=True)
    words = args.groups.split(",")
    chosen = [target for target in targets() if any(word in group_of(target) for word in words)]
    share = {group: 60 * args.minutes / sum(group_of(t) == group for t in chosen) for group in map(group_of, chosen)}
    known = {record["target"] for record in read(journal)} if not args.again else set()
    chosen.sort(key=lambda target: [*GROUPS].index(group_of(target)))
    with ThreadPoolExecutor(args.processes) as pool:
        waiting = [t for t in chosen if name_of(t) not in known]
        list(pool.map(lambda target: feed(target, share[group_of(target)], journal), waiting))
    records = read(journal)
    if args.write:
        today = f"{datetime.now(UTC):%d %B %Y}"
        page(args.write, records, f"python -m tests.fuzz --minutes {args.minutes:g}", f"{machine()}, {today}")
    return 1 if any(record["failure"] for record in records) else 0


if __name__ == "__main__":
    raise SystemExit(main())
