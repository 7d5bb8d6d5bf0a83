"""The time of `r1 stages`, `r1 plan` and `r1 prune` in a home with many artifacts, beside the same in an empty home.

    python -m benchmarks.store_load [--artifacts 10000] [--home FOLDER] [--write docs/measured/store_load.md]

The artifacts are real: published by the store, with configurations and keys of the recipe `tiny`, each made from those
before it, their files small. For each seed the recipe was changed some times, so most artifacts are history. What a
command takes in an empty home is imports and the start of Python; the difference in processor seconds is its work on
the artifacts. Each is the least of three; the caches of the operating system are warm.
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
from pathlib import Path
from unittest import mock

from benchmarks.arguments import at_least, output_file, write_output
from benchmarks.machine import measured_by
from flows.recipe.load import load_recipe
from flows.stage_contract.stage import hashed_config, key_of
from flows.stage_graphs import r1_graph
from tasks.store.manifest import Manifest
from tasks.store.stale import make_current
from tasks.store.store import Store

COMMANDS = {"stages": ["stages"], "plan": ["plan", "tiny"], "prune": ["prune"], "prune --yes": ["prune", "--yes"]}
VERIFY = {"verify --quick": ["verify", "--quick"], "verify": ["verify"]}
CHANGES = 10
"""Settings that each seed is run with, one after the other."""
RUNS = 3


def build(home: Path, count: int) -> int:
    """Publishes `count` artifacts and some more, so that every run is whole. Returns their number."""
    store, number, seed = Store(home), 0, 0
    with mock.patch("os.fsync"):  # a power cut may have this home
        while number < count:
            for change in range(CHANGES):
                made = run_recipe(store, seed, change)
                number += len(made)
            seed += 1
    return number


def run_recipe(store: Store, seed: int, change: int) -> dict[str, Manifest]:
    """The artifacts of one run of `tiny`, which become current."""
    recipe = load_recipe("tiny", [f"problems.held_out_max={100 + change}"])
    made: dict[str, Manifest] = {}
    for step in r1_graph(recipe):
        config, refs = step.config(recipe), {name: made[maker].ref for name, maker in step.inputs.items()}
        key = key_of(step.stage, config, seed, refs)
        with store.attempt(step.stage.name, key) as attempt:
            for file in ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json"):
                (attempt.out / file).write_text(f"{file} {key}")
            made[step.name] = attempt.publish(
                stage_version=step.stage.version,
                config=hashed_config(step.stage, config, seed),
                inputs=refs,
                metrics={f"metric_{i}": i / 7 for i in range(20)},
            )
    make_current(store, "tiny", seed, made.values())
    return made


def measure(home: Path, arguments: list[str], runs: int = RUNS) -> tuple[float, float]:
    """Least wall seconds and least processor seconds."""
    environment = {**os.environ, "R1FLOW_HOME": str(home)}
    results = []
    for _ in range(runs):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = [sys.executable, "-m", "flows.cli", *arguments]
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wall = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
        results.append((wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return min(wall for wall, _ in results), min(cpu for _, cpu in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifacts", type=at_least(1), default=10_000)
    parser.add_argument("--home", type=Path, help="a new or an empty folder; default: a temporary one")
    parser.add_argument("--write", type=output_file, metavar="FILE", help="write the page with the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home, empty = args.home or Path(folder) / "home", Path(folder) / "empty"
        home.mkdir(exist_ok=True)
        number = build(home, args.artifacts)
        os.sync()  # so that the system does not write them while commands are timed
        rows = []
        for name, arguments in {**COMMANDS, **VERIFY}.items():
            runs = 1 if "--yes" in arguments else RUNS
            artifacts = sum(1 for _ in home.glob("artifacts/*/*/*"))
            (wall, cpu), (_, empty_cpu) = measure(home, arguments, runs), measure(empty, arguments)
            rows.append(
                {
                    "command": name,
                    "artifacts": artifacts,
                    "seconds": wall,
                    "cpu_s": cpu,
                    "empty_cpu_s": empty_cpu,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    text = page(number, rows)
    print(text)
    if args.write:
        write_output(args.write, text)


def page(number: int, rows: list[dict[str, float | str]]) -> str:
    """The figures as a page of the documentation."""
    lines = [
        "# Commands in a home with many artifacts",
        "",
        measured_by(f"python -m benchmarks.store_load --artifacts {number}"),
        "The least of three, with warm caches. *Own work* is the processor time that a command takes more than in an",
        "empty home, where it starts Python and imports libraries; the other seconds are those of the clock.",
        "The commands run in this order, `verify` on what `prune --yes` left.",
        "",
        "| command | artifacts | seconds | processor seconds | in an empty home | own work |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        work = float(row["cpu_s"]) - float(row["empty_cpu_s"])
        lines.append(
            f"| `r1 {row['command']}` | {row['artifacts']} | {row['seconds']:.2f} | {row['cpu_s']:.2f} "
            f"| {row['empty_cpu_s']:.2f} | {work:.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
