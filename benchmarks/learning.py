"""Does the recipe learn, on any machine? Runs `tiny` in cells of seeds x threads x CPU levels x loads, and prints what
holds of claims.toml in each.

python benchmarks/learning.py [--seeds 0 1 2] [--threads 1 2 4] [--cpu native avx2] [--load quiet busy] [--jobs 2]
                              [--output docs/measured/learning.md]

Without --seeds: those of the rule in claims.toml. A cell takes seven minutes on two quiet cores. With `--jobs` several
cells run at the same time: as many as there are cores for their threads. A study that was stopped goes on where it was:
every finished cell is a line of the journal, and counts as long as the recipe's version is the same (`--journal` puts
it elsewhere). `--show` runs nothing and prints what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import get_args

from arguments import at_least, output_file, write_output
from claims import Claims
from learning_cells import ROOT, Cell, Cpu, Journal, Load, cells, code_commit, run
from learning_page import Records, failed, page

sys.path.insert(0, str(ROOT))

from recipe_version import r1_version

from grpo.errors import InputError
from tests.support.r1 import pictured_digest


def study(planned: list[Cell], journal: Journal, recipe: str, work: Path, jobs: int) -> None:
    """Runs the cells that have no result yet, `jobs` of them at a time."""
    known = journal.records()
    left = [cell for cell in planned if "result" not in known.get(cell, {})]
    pool = ThreadPoolExecutor(jobs)
    try:
        for number, done in enumerate(as_completed([pool.submit(run, cell, recipe, work) for cell in left]), 1):
            record = done.result()
            journal.add(record)
            name = Cell(**record["cell"]).name
            print(f"{number} of {len(left)}: {name}, {record['seconds']:.0f} s", file=sys.stderr, flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # on Ctrl-C no further cell begins


def made_with(recipe: str, records: Records, jobs: int) -> str:
    """Commits, recipe, and what else there is to know about the runs; the end of the page's first sentence."""
    own = recipe.endswith(".toml")
    digest = pictured_digest(Path(recipe) if own else ROOT / "flows" / "recipes" / f"{recipe}.toml")
    beside = f". {jobs} cells ran at a time, so their minutes say little about a quiet machine" if jobs > 1 else ""
    commits = " and ".join(dict.fromkeys(record["commit"] for record in records.values()))
    return f"at commit {commits or code_commit()}; SHA-256 of the recipe's sections: {digest[:12]}{beside}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    claims = Claims.read()
    parser.add_argument("--seeds", type=int, nargs="+", default=claims.seeds.seeds())
    parser.add_argument("--threads", type=at_least(1), nargs="+", default=[os.cpu_count() or 1])
    parser.add_argument("--cpu", nargs="+", default=["native"], choices=get_args(Cpu))
    parser.add_argument("--load", nargs="+", default=["quiet"], choices=get_args(Load))
    parser.add_argument("--jobs", type=at_least(1), default=1, help="cells at a time")
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--work", type=Path, default=Path("learning_cells"), help="homes of running cells, the journal")
    parser.add_argument("--journal", type=Path, help="else journal.jsonl of --work")
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", action="store_true", help="run nothing")
    args = parser.parse_args()
    if args.journal and args.journal.is_dir():
        parser.error(f"--journal: {args.journal} is a folder; give a file")
    planned = cells(args.seeds, args.threads, args.cpu, args.load)
    work = args.work.absolute()
    try:
        journal = Journal(args.journal or work / "journal.jsonl", args.recipe, r1_version(args.recipe))
        journal.records()
    except InputError as error:
        parser.error(str(error))
    if not args.show:
        study(planned, journal, args.recipe, work, args.jobs)
    known = journal.records()
    records = {cell: known[cell] for cell in planned if cell in known}
    places = (args.work, args.journal, args.output)
    here = {"--show", "--work", "--journal", "--output", *map(str, places)}
    shown = [arg for arg in sys.argv[1:] if arg not in here]
    command = " ".join(["python benchmarks/learning.py", *shown])
    text = page(claims, records, planned, command, args.recipe, made_with(args.recipe, records, args.jobs))
    print(text)
    if args.output:
        write_output(args.output, text)
    wrong = failed(claims, records)
    if args.json:
        print(json.dumps({"cells": len(records), "of": len(planned), "failed": [cell.name for cell in wrong]}))
    return 1 if wrong or len(records) < len(planned) else 0


if __name__ == "__main__":
    sys.exit(main())
