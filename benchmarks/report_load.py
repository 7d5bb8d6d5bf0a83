"""The report page of a run with 100,000 metric points: seconds to write it, its size, and seconds until it is drawn.

python benchmarks/report_load.py --home HOME [--run RUN] [--points 0 100000] [--output docs/measured/report_load.md]

HOME is an R1FLOW_HOME with a finished run of `r1 run tiny`. It is copied; points are added to the RL stage of this run
in the copy.
Drawing is measured in Chromium where playwright and a browser are installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from arguments import at_least, output_file, write_output
from machine import measured_by

from grpo.errors import InputError
from tasks.store.store import Store
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.reader import TrackedRun
from tasks.tracking.recipe_run import load_run

STAGE = "reasoning_rl"
BATCH = 1000
"""Most metric points that MLflow takes in one call."""


def rl_stage(home: Path, reference: str) -> TrackedRun:
    """The RL stage of a recipe run, or if the run reused it, the one that made it.

    Raises:
        InputError: there is no such run, or it has no such stage with metrics.
    """
    reader = Tracking(default_uri(home)).reader
    run = reader.find(reference)
    stage = load_run(reader, Store(home), run).stage(STAGE)
    if stage is None or not stage.maker.metrics:
        raise InputError(f"--run {reference}: {run.label} has no metrics of {STAGE}; give another run")
    return stage.maker


def add_points(home: Path, stage: TrackedRun, count: int) -> int:
    """Logs `count` points to a stage's run, spread over its metrics. Returns the steps of a metric."""
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    client = MlflowClient(default_uri(home))
    names = sorted(stage.metrics)
    steps = count // len(names)
    now = int(time.time() * 1000)
    points = [Metric(n, stage.metrics[n], now, 1000 + step) for step in range(steps) for n in names]
    for start in range(0, len(points), BATCH):
        client.log_batch(stage.id, metrics=points[start : start + BATCH])
    return steps


def write_report(home: Path, run: str, page: Path) -> float:
    """Seconds of `r1 report`, a process of its own from start to end."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "flows.cli", "report", run, "--out", str(page)]
    environment = os.environ | {"R1FLOW_HOME": str(home), "MLFLOW_TRACKING_URI": default_uri(home)}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def draw(page: Path) -> float | None:
    """Seconds until Chromium has loaded the page, without its own start. None where there is no browser."""
    chromium_program = shutil.which("chromium")
    if chromium_program is None:
        return None
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=chromium_program)
        tab = chromium.new_page()
        began = time.perf_counter()
        tab.goto(page.as_uri(), wait_until="load")
        seconds = time.perf_counter() - began
        chromium.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--run", default="latest", help="as `r1 report` takes it (default: latest)")
    parser.add_argument("--points", type=at_least(0), nargs="+", default=[0, 100_000])
    parser.add_argument("--output", type=output_file)
    args = parser.parse_args()
    if not (args.home / "mlflow.db").is_file():
        parser.error(f"--home {args.home}: has no mlflow.db; run `r1 run tiny` with this R1FLOW_HOME first")
    rows = []
    for count in args.points:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder) / "home"
            shutil.copytree(args.home, home, symlinks=True)
            try:
                steps = add_points(home, rl_stage(home, args.run), count)
            except InputError as error:
                parser.error(str(error))
            page = home / "report.html"
            seconds = min(write_report(home, args.run, page) for _ in range(3))
            drawn = draw(page)
            shown = "no browser" if drawn is None else f"{drawn:.2f} s"
            rows.append(f"| {count:,} | {steps:,} | {seconds:.1f} s | {page.stat().st_size / 1000:.0f} kB | {shown} |")
            print(rows[-1], flush=True)
    text = f"""# The report of a long run

{measured_by("python benchmarks/report_load.py --home HOME")}
Points are added to the metrics of {STAGE} in MLflow's SQLite database. Writing is `r1 report` as a process of its own,
the start of Python and MLflow included: the least of three. Opening is Chromium's time to load the page.

| points added | steps of each metric | to write | size | to open |
|---|---|---|---|---|
{chr(10).join(rows)}
"""
    print(text)
    if args.output:
        write_output(args.output, text)


if __name__ == "__main__":
    main()
