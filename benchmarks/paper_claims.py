"""The papers' claims, tried on the recipe `tiny`: GRPO against (online) RFT, process supervision, iterated reward
models, cold start, distillation, and others. paper_claims.toml states the design.

python benchmarks/paper_claims.py [--questions NAME ...] [--seeds N ...] [--jobs 1] [--dispatch] [--estimate] [--show]
                                  [--home build/paper_claims] [--journal FILE] [--output docs/claims.md]

Every arm is a run of the recipe with overrides, in a home of the study's own: what was made is reused, and a study that
was stopped, or killed, goes on with the same command. First come the pilot runs, which choose each arm's learning rate
and number of steps on seeds of their own, then the seeds of the report. A run that diverges is a
result; any other failure ends its seed.

--questions and --seeds do a part. --jobs runs so many seeds side by side. --dispatch sends every stage to its work
pool: give the home of `r1 up`. --estimate only says how much is left; --show only prints the page. The page always has
all questions and what was run of them.

Results are lines of the journal, by default in the home. They count on any machine, with any home, as long as the
recipe's version is the same.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from arguments import at_least, output_file
from paper_claims_design import FILE, Design, PaperClaim, Run
from paper_claims_estimate import estimate_seconds
from paper_claims_outcomes import Study
from paper_claims_page import around, page, power_table, write
from paper_claims_plan import Journal, current, decide, main_runs, superseded
from pydantic import ValidationError

from grpo.errors import InputError

ROOT = Path(__file__).parents[1]


def missing_runs(design: Design, arms: Sequence[str], seeds: Sequence[int], journal: Journal) -> list[Run]:
    """Runs to execute next: pilot runs as long as some are missing, then main runs."""
    records = journal.records()
    choices, pilots = decide(design, arms, records)
    if pilots:
        return pilots
    known = current(design, records, choices)
    return [run for run in main_runs(design, arms, choices, seeds) if run not in known]


def journal_of(design: Design, args: argparse.Namespace) -> Journal:
    """The journal, which keeps to the version of all stages that arms are made of.

    Raises:
        InputError: there is no such recipe, or it lacks a section that an arm needs.
    """
    from paper_claims_graphs import every_step
    from recipe_version import recipe_version

    from flows.recipe.load import load_recipe

    recipe = load_recipe(design.recipe)
    return Journal(
        args.journal, recipe_version(recipe, every_step({arm.graph for arm in design.arms.values()}, recipe))
    )


def work(design: Design, arms: Sequence[str], seed: int, seeds: Sequence[int], args: argparse.Namespace) -> int:
    """Executes the missing runs of one seed in this process. Returns the exit code."""
    from flows.home import prepare_environment

    prepare_environment()
    from paper_claims_runs import execute

    from flows.run.executor import RecipeFailed

    journal = journal_of(design, args)
    try:
        choices, _ = decide(design, arms, journal.records())
        runs = [run for run in missing_runs(design, arms, seeds, journal) if run.seed == seed]
        execute(design, runs, choices, journal, args.dispatch, args.parent)
    except (InputError, RecipeFailed) as error:
        print(f"seed {seed}: {error}", file=sys.stderr)
        return 1
    return 0


def study(design: Design, claims: Sequence[PaperClaim], seeds: Sequence[int], args: argparse.Namespace) -> bool:
    """Executes everything that is missing, in one process per seed. Returns whether all runs succeeded."""
    journal = journal_of(design, args)
    arms = design.arms_for(claims)
    before: list[Run] = []
    while runs := missing_runs(design, arms, seeds, journal):
        if runs == before:
            return False  # a round without any progress
        before = runs
        of_seeds = list(dict.fromkeys(run.seed for run in runs))
        print(f"{len(runs)} runs on seeds {', '.join(map(str, of_seeds))}", file=sys.stderr, flush=True)
        common = ["--design", str(args.design.absolute()), "--home", str(args.home), "--parent", str(os.getpid())]
        common += ["--journal", str(args.journal)]
        common += ["--questions", *(claim.name for claim in claims), "--seeds", *map(str, seeds)]
        common += ["--dispatch"] if args.dispatch else []
        environment = {**os.environ, "R1FLOW_HOME": str(args.home)}

        def run_seed(seed: int, common: list[str] = common, environment: dict[str, str] = environment) -> int:
            command = [sys.executable, __file__, *common, "--worker", str(seed)]
            return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode

        with ThreadPoolExecutor(args.jobs) as pool:
            codes = list(pool.map(run_seed, of_seeds))
        if any(codes):
            wrong = [str(seed) for seed, code in zip(of_seeds, codes, strict=True) if code]
            print(f"seeds {', '.join(wrong)} failed; the same command goes on", file=sys.stderr)
            return False
    return True


def first_line(error: OSError | ValueError) -> str:
    """What is wrong with a design, and where, on one line."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    return (f"{place}: " if place else "") + first["msg"].removeprefix("Value error, ")


def cost(design: Design, arms: Sequence[str], seeds: Sequence[int], journal: Journal, home: Path) -> str:
    from tasks.store.store import Store

    def has(key: str) -> bool:
        return home.is_dir() and Store(home).find(key, compare=False) is not None

    everything, left = estimate_seconds(design, arms, seeds, journal.records(), has)
    hours = f"{everything / 3600:.1f} hours of one core"
    return f"All runs take about {hours}" + (f", {left / 3600:.1f} of them are left." if left else "; none are left.")


def main() -> int:
    file = argparse.ArgumentParser(add_help=False)
    file.add_argument("--design", type=Path, default=FILE, help="another file than paper_claims.toml")
    path = file.parse_known_args()[0].design
    try:
        design = Design.read(path)
    except (OSError, ValueError) as error:  # TOML's and pydantic's errors are ValueErrors
        file.error(f"--design {path}: {first_line(error)}")
    names = [claim.name for claim in design.claims]
    parser = argparse.ArgumentParser(
        parents=[file], description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", nargs="+", default=[], choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seeds", type=int, nargs="+", choices=design.seeds.seeds(), metavar="N", help="some of them")
    parser.add_argument("--jobs", type=at_least(1), default=1, help="seeds side by side; set OMP_NUM_THREADS to fit")
    parser.add_argument("--home", type=Path, default=Path("build/paper_claims"), help="R1FLOW_HOME of the runs")
    parser.add_argument("--journal", type=Path, help="results; else journal.jsonl of --home")
    parser.add_argument("--dispatch", action="store_true", help="every stage on its work pool")
    parser.add_argument("--estimate", action="store_true", help="run nothing: cost and power")
    parser.add_argument("--show", action="store_true", help="run nothing: the page as it would be now")
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.journal and args.journal.is_dir():
        parser.error(f"--journal: {args.journal} is a folder; give a file")
    shown_home, args.home = args.home, args.home.absolute()
    args.journal = (args.journal or args.home / "journal.jsonl").absolute()
    claims = design.claims_named(args.questions)
    arms = design.arms_for(claims)
    seeds = args.seeds or design.seeds.seeds()
    if args.worker is not None:
        return work(design, arms, args.worker, seeds, args)
    try:
        journal = journal_of(design, args)
    except InputError as error:
        parser.error(f"--design {path}: {error}")
    try:
        if args.output:
            around(args.output)
        journal.records()
    except InputError as error:
        parser.error(str(error))
    print(cost(design, arms, seeds, journal, args.home), file=sys.stderr, flush=True)
    if args.estimate:
        nothing = Study(design, {}, {})
        print("\n".join(power_table(design, [nothing.result(claim) for claim in claims])))
        return 0
    done = True if args.show else study(design, claims, seeds, args)
    # The page is always that of the whole study, whichever part of it has just run.
    found, every_arm = journal.records(), design.arms_for(design.claims)
    choices, _ = decide(design, every_arm, found)
    records = current(design, found, choices)
    so_far = Study(design, choices, records)
    results = [so_far.result(claim) for claim in design.claims]
    hours = cost(design, every_arm, design.seeds.seeds(), journal, args.home)
    text = page(design, results, choices, records, superseded(design, found), hours, shown_home)
    print(text)
    if args.output and done:
        write(args.output, text)
    return 0 if done else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
