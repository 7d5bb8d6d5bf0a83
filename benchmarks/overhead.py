"""The cost of orchestration: a recipe's wall time beside its trainers run by themselves, and a run that reuses all.

python benchmarks/overhead.py [--recipe tiny] [--set SECTION.FIELD=VALUE ...] [--json]
python benchmarks/overhead.py --reused-in HOME     only a run that reuses all, in a home that has run the recipe

The recipe runs in a fresh home, as `r1 run` does, with the start of servers, Prefect, MLflow, the store and the stages'
own work on data. Each of its trainers is run once more directly, by `python -m grpo.train`, as soon as it has ended, so
that both see the same minute of the machine; that time is taken out of the wall time. What stages do themselves
(problems, filters, judges, tables) is their work too, and named apart. `overhead_share` is the part of the wall time
that neither needs: servers, flows, MLflow, the store, the start of processes and the watch over them. It is below zero
where trainers that are forks (grpo/fork_server.py) spare more than all of that costs. Then the same command again,
three times: `reused_seconds` and `reused_cpu_seconds` of the quickest.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import machine

TRIES = 3


class Directly:
    """Stands in the place of the launcher's wait for a trainer: waits, then runs the same job by itself."""

    def __init__(self, wait: Any, folder: Path):
        self.wait, self.folder = wait, folder
        self.launched_s: list[float] = []
        self.direct_s: list[float] = []

    def __call__(
        self, command: Sequence[str], log: Path, environment: dict[str, str], mark: str, poll: Any, lock: Any
    ) -> int:
        began = time.monotonic()
        code: int = self.wait(command, log, environment, mark, poll, lock)
        self.launched_s.append(time.monotonic() - began)
        place = self.folder / str(len(self.direct_s))
        place.mkdir(parents=True)
        job = json.loads(Path(command[-1]).read_text())
        job |= {"out": str(place / "out"), "state": str(place / "state")}
        job |= {"metrics": str(place / "metrics.jsonl"), "result": str(place / "result.json")}
        (place / "job.json").write_text(json.dumps(job))
        began = time.monotonic()
        with (place / "log").open("wb") as output:
            own = [*command[:-1], str(place / "job.json")]
            again = subprocess.run(own, env=environment, stdout=output, stderr=output)
        self.direct_s.append(time.monotonic() - began)
        if again.returncode != code:
            raise SystemExit(f"{job['kind']}: {code} when launched, {again.returncode} by itself; see {place / 'log'}")
        return code


def first_run(recipe: str, overrides: Sequence[str], folder: Path) -> tuple[Directly, float, float]:
    """(its trainers' times, seconds in stages, wall seconds), the last two without those of the direct runs."""
    began = time.monotonic()
    from flows.home import home, prepare_environment, tracking
    from flows.prefect_server import prefect_server

    prepare_environment()
    from flows.prefect_flows import train_r1

    directly, builds = watch(folder)
    tracking().open()
    with prefect_server(home() / "logs"):
        train_r1(recipe=recipe, overrides=[*overrides])
    direct = sum(directly.direct_s)
    return directly, builds.seconds - direct, time.monotonic() - began - direct


def watch(folder: Path) -> tuple[Directly, Builds]:
    """Takes the time of the trainers and stages of this process from now on."""
    from flows.stage_contract import runner
    from tasks.trainer import launch

    directly, builds = Directly(launch.run_watched, folder), Builds(runner._build)
    launch.run_watched, runner._build = directly, builds  # type: ignore[assignment]
    return directly, builds


class Builds:
    """Stands in the place of `flows.stage_contract.runner._build`, and takes the time of a stage's own work, with its
    trainers."""

    def __init__(self, make: Any) -> None:
        self.make, self.seconds = make, 0.0

    def __call__(self, stage: Any, *args: Any) -> Any:
        def timed(context: Any) -> Any:
            began = time.monotonic()
            try:
                return stage.build(context)
            finally:
                self.seconds += time.monotonic() - began

        return self.make(replace(stage, build=timed), *args)


def reused(recipe: str, overrides: Sequence[str]) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of a run that reuses every stage."""
    sets = [part for value in overrides for part in ("--set", value)]
    command = [sys.executable, "-m", "flows.cli", "run", recipe, *sets, "--json"]
    began, before = time.monotonic(), _cpu_of_children()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    seconds = time.monotonic() - began
    assert {stage["status"] for stage in json.loads(done.stdout.splitlines()[-1])["stages"]} == {"reused"}
    return seconds, _cpu_of_children() - before


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--reused-in", type=Path, metavar="HOME")
    args = parser.parse_args()
    if args.reused_in:
        os.environ["R1FLOW_HOME"] = str(args.reused_in.resolve())
        again, cpu = min(reused(args.recipe, args.overrides) for _ in range(TRIES))
        print(f"On {machine()}, recipe {args.recipe!r}, everything reused: {again:.1f} s, {cpu:.1f} s of CPU")
        return 0
    with tempfile.TemporaryDirectory() as work:
        os.environ["R1FLOW_HOME"] = str(Path(work) / "home")
        directly, stages, wall = first_run(args.recipe, args.overrides, Path(work) / "direct")
        again, cpu = min(reused(args.recipe, args.overrides) for _ in range(TRIES))
    direct, launched = sum(directly.direct_s), sum(directly.launched_s)
    data = stages - launched
    overhead = wall - direct - data
    print(f"On {machine()}, recipe {args.recipe!r}:\n")
    print(f"  the recipe                        {wall:7.1f} s")
    print(f"  its {len(directly.direct_s):2} trainers, by themselves    {direct:7.1f} s")
    print(f"  the same while it waits for them  {launched:7.1f} s")
    print(f"  its stages' own work on data      {data:7.1f} s, {data / wall:.1%}")
    print(f"  all else                          {overhead:7.1f} s, {overhead / wall:.1%}")
    print(f"  again, with everything reused     {again:7.1f} s, {cpu:.1f} s of CPU")
    if args.json:
        shares = {"overhead_share": overhead / wall}
        print(json.dumps({**shares, "reused_seconds": again, "reused_cpu_seconds": cpu}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
