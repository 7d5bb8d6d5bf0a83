"""The report page of a run with 100,000 metric points: seconds to write it, its size, and seconds until it is drawn.

python benchmarks/report_load.py --home HOME [--run RUN] [--points 0 100000] [--output docs/measured/report_load.md]

HOME is an R1FLOW_HOME with a finished run of `r1 run tiny`. It is copied; points are added to the copy's RL stage.
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

from machine import machine

STAGE = "reasoning_rl"
BATCH = 1000
"""Most metric points that MLflow takes in one call."""


def add_points(home: Path, count: int) -> int:
    """Logs `count` points to the newest run of the RL stage, spread over its metrics. Returns the steps of a metric."""
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    experiments = [e.experiment_id for e in client.search_experiments()]
    runs = client.search_runs(experiments, f"attributes.run_name LIKE '{STAGE}%' AND attributes.status = 'FINISHED'")
    if not runs:
        raise SystemExit(f"{home}: no finished run of {STAGE}; run `r1 run tiny` with this R1FLOW_HOME first")
    run, names = runs[0], sorted(runs[0].data.metrics)
    steps = count // len(names)
    now = int(time.time() * 1000)
    points = [Metric(n, run.data.metrics[n], now, 1000 + step) for step in range(steps) for n in names]
    for start in range(0, len(points), BATCH):
        client.log_batch(run.info.run_id, metrics=points[start : start + BATCH])
    return steps


def write_report(home: Path, run: str, page: Path) -> float:
    """Seconds of `r1 report`, a process of its own from start to end."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "flows.cli", "report", run, "--out", str(page)]
    subprocess.run(command, env=os.environ | {"R1FLOW_HOME": str(home)}, check=True, stdout=subprocess.DEVNULL)
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
    parser.add_argument("--points", type=int, nargs="+", default=[0, 100_000])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    for count in args.points:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder) / "home"
            shutil.copytree(args.home, home, symlinks=True)
            steps = add_points(home, count)
            page = home / "report.html"
            seconds = min(write_report(home, args.run, page) for _ in range(3))
            drawn = draw(page)
            shown = "no browser" if drawn is None else f"{drawn:.2f} s"
            rows.append(f"| {count:,} | {steps:,} | {seconds:.1f} s | {page.stat().st_size / 1000:.0f} kB | {shown} |")
            print(rows[-1], flush=True)
    text = f"""# The report of a long run

`python benchmarks/report_load.py --home HOME` on {machine()}. Points are added to the metrics of {STAGE} in MLflow's
SQLite database. Writing is `r1 report` as a process of its own, the start of Python and MLflow included: the least of
three. Opening is Chromium's time to load the page.

| points added | steps of each metric | to write | size | to open |
|---|---|---|---|---|
{chr(10).join(rows)}
"""
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
