"""What a busy neighbour costs: step times of pretraining, RL and a reward model beside 0, 1, 2 and 4 busy processes.

    R1FLOW_HOME=... r1 run tiny; R1FLOW_HOME=... python benchmarks/contention.py [--busy 0 1 2 4] [--seconds 20]
        [--rounds 1] [--output docs/measured/contention.md]

The jobs are those of `tiny`, on what the run has made. Each runs in a trainer of its own, as a flow starts it, for
so many seconds, of which the first third warms up. The fair share of a job with T threads (OMP_NUM_THREADS, by default
one per core) beside b busy processes of one thread is T / (T + b) of the cores, or all its T threads where there is
room. `times fair` is the step's time over
the quiet step's time divided by that share: 1 is fair, below 1 is better than fair.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arguments import at_least, output_file, write_output
from extras import stop
from machine import measured_by

from flows.recipe.load import load_recipe
from flows.stage_contract.references import resolve
from grpo.errors import InputError
from tasks.problems.miniature.corpus import corpus
from tasks.trainer.launch import launch

JOBS = ("pretraining", "RL", "reward model")
BUSY = "while True: pass"


class _Enough(Exception):
    pass


def jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """Jobs of `tiny` that never end by themselves, by name."""
    recipe = load_recipe("tiny", [])
    text = folder / "corpus.txt"
    text.write_text(corpus(6000, 0, recipe.base.tagged_share))
    paths = {name: resolve(f"latest:{name}").path for name in ("problems", "cold_start_sft", "sft", "reward_models")}
    steps = {"steps": 1_000_000, "save_every": 1_000_000}
    pretrain = recipe.base.pretrain.model_dump(mode="json") | steps
    reasoning = recipe.reasoning_rl.model_dump(mode="json") | steps
    helpful = recipe.reward_models.helpful.model_dump(mode="json") | {"epochs": 1000, "save_every": 1_000_000}
    data = paths["reward_models"] / "data" / "helpful.parquet"
    problems = [str(paths["problems"] / "train.parquet")]
    return {
        "pretraining": {"kind": "pretrain", "corpus": str(text), "settings": pretrain},
        "RL": {"kind": "rl", "model": str(paths["cold_start_sft"]), "problems": problems, "settings": reasoning},
        "reward model": {
            "kind": "reward_model",
            "model": str(paths["sft"]),
            "data": str(data),
            "loss": "pairs",
            "settings": helpful,
        },
    }


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that compute for nothing."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def step_seconds(job: dict[str, Any], folder: Path, seconds: float) -> float:
    """Median time between two steps of a job that runs for so long after its first step."""
    times: list[float] = []

    def note(records: list[dict[str, Any]]) -> None:
        times.extend([time.monotonic()] * len(records))
        if times[-1] - times[0] > seconds:
            raise _Enough

    for name in ("out", "state"):
        (folder / name).mkdir(parents=True)
    files = {name: str(folder / name) for name in ("out", "state", "metrics.jsonl", "result.json")}
    whole = {"seed": 0, **job, "metrics": files.pop("metrics.jsonl"), "result": files.pop("result.json"), **files}
    with contextlib.suppress(_Enough):
        launch(whole, folder, on_metrics=note)
    kept = [moment for moment in times if moment - times[0] >= seconds / 3]
    if len(kept) < 2 or kept[-1] == kept[0]:
        raise InputError(f"too few steps in {seconds:g} s; raise --seconds")
    # Records arrive in bunches, so the first moment's records were made before it.
    return (kept[-1] - kept[0]) / (len(kept) - kept.count(kept[0]))


def fair_share(threads: int, neighbours: int, cores: int) -> float:
    """Cores that are a job's by right."""
    return min(threads, cores * threads / (threads + neighbours))


def threads_of_job(cores: int) -> int:
    """Threads that a trainer computes with: torch takes the variable's first number, else one per core."""
    return min(cores, int(os.environ.get("OMP_NUM_THREADS", "").partition(",")[0] or cores))


def page(measured: dict[str, dict[int, list[float]]], arguments: argparse.Namespace, cores: int) -> str:
    """The measurements as Markdown."""
    quiet, threads = min(arguments.busy), threads_of_job(cores)
    lines = [
        "# Beside busy neighbours",
        "",
        measured_by(f"python benchmarks/contention.py --seconds {arguments.seconds:g} --rounds {arguments.rounds}"),
        "Steps of `tiny`'s jobs beside busy processes of one thread each. Fair: the quiet step's time over the share",
        "of the cores that is a job's by right; 1.0 is fair.",
        "",
        "| job | busy processes | step, s | times the quiet step | times fair |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, by_busy in measured.items():
        alone = statistics.median(by_busy[quiet])
        for count, values in by_busy.items():
            step = statistics.median(values)
            fair = alone * fair_share(threads, quiet, cores) / fair_share(threads, count, cores)
            lines.append(f"| {name} | {count} | {step:.3f} | {step / alone:.2f} | {step / fair:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=at_least(0), nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=at_least(1), default=1)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS)
    parser.add_argument("--output", type=output_file)
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    measured: dict[str, dict[int, list[float]]] = {name: {n: [] for n in arguments.busy} for name in arguments.jobs}
    with tempfile.TemporaryDirectory(prefix="contention-") as work:
        prepared = jobs(Path(work))
        for number in range(arguments.rounds):
            for name in arguments.jobs:
                for count in arguments.busy:
                    with busy(count):
                        folder = Path(work) / f"{number}-{name}-{count}"
                        seconds = step_seconds(prepared[name], folder, arguments.seconds)
                    measured[name][count].append(seconds)
                    print(f"{name}, {count} busy: {seconds:.3f} s a step", file=sys.stderr, flush=True)
    text = page(measured, arguments, cores)
    print(text)
    if arguments.output:
        write_output(arguments.output, text)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        stop(str(error))
