"""How do time and memory of training grow? One axis at a time, the rest fixed; each point is a process of its own.

    python benchmarks/growth.py [--axis NAME]... [--output docs/measured/growth.md] [--json]

Axes: length of the completions, group size, model size, number of samples, number of processes. Completions never end
by themselves, so that an axis is exact. A GRPO step is taken apart into sampling, measuring (the reference's
log-probabilities) and update; a first step of short completions warms up. With --output a picture of each axis is
written beside it, in images/.

One claim is checked, and the exit code is 1 where it does not hold: where completions get twice as long and a
micro-batch holds as many tokens as before, peak memory grows by less than 1.3 times. With --json the last line is an
object: "memory_growth" of each doubling, "holds", and all points.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from arguments import at_least, output_file, write_output
from growth_models import Models
from growth_page import MAX_GROWTH, doublings, draw, markdown
from growth_points import AXES, Demonstrations, Point, Record
from inputs import need_model
from machine import machine
from measure import run

HERE = Path(__file__).parent


def measure(point: Point, model: Path, folder: Path, threads: int, **environment: str) -> Record:
    """Seconds and memory of one point, in processes of its own, with more in their environment."""
    folder.mkdir(parents=True)
    files = {name: folder / name for name in ("out", "state", "metrics", "result")}
    job_file = folder / "job.json"
    job_file.write_text(json.dumps({**point.job(model, folder), **files, "seed": 0}, default=str))
    command = [sys.executable]
    if point.processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(point.processes)]
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE), str(HERE.parent)]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(point.threads or threads)}
    results = run([*command, str(HERE / "growth_step.py"), str(job_file)], folder / "log", environment)
    ranks = [json.loads((folder / f"phases-{rank}.json").read_text()) for rank in range(point.processes)]
    return point.result(ranks, folder) | {"peak_mb": results["peak_mb"], "of": asdict(point)}


def measure_axis(name: str, models: Models, args: argparse.Namespace) -> dict[str, dict[float, Record]]:
    results: dict[str, dict[float, Record]] = {}
    for series, points in AXES[name].series.items():
        results[series] = {}
        for value, point in points.items():
            folder = models.work / f"{name}-{series}-{value}"
            model = models(point.model, endless=not isinstance(point, Demonstrations))
            result = measure(point, model, folder, args.threads)
            if name == "model":
                value = round(models.millions(point.model), 1)
            results[series][value] = result
            say(f"{name}: {series}, {value:,} {AXES[name].unit}: {describe(result)}")
    return results


def describe(result: Record) -> str:
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in result["parts"].items())
    return f"{result['seconds']:.2f} s ({parts}), {result['peak_mb']:,.0f} MB"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", action="append", choices=AXES, help="may be repeated; all by default")
    parser.add_argument("--threads", type=at_least(1), default=os.cpu_count())
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    points = [point for name in args.axis or AXES for of in AXES[name].series.values() for point in of.values()]
    if any(point.model == "135M" for point in points):
        need_model(args.build)
    began = time.monotonic()
    results: dict[str, dict[str, dict[float, Record]]] = {}
    args.build.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="growth-", dir=args.build.resolve()) as work:
        models = Models(args.build, Path(work))
        for name in args.axis or AXES:
            results[name] = measure_axis(name, models, args)
    text = markdown(results, args, (time.monotonic() - began) / 60)
    print(text)
    if args.output:
        for name, series in results.items():
            draw(AXES[name], series, args.output.parent / "images" / f"growth-{name}.png")
        write_output(args.output, text)
    grown = doublings(results.get("length", {}), lambda r: r["peak_mb"])
    holds = all(g < MAX_GROWTH for g in itertools.chain(*grown.values()))
    if args.json:
        checked = {"memory_growth": grown, "holds": holds} if grown else {}
        print(json.dumps(checked | {"axes": results, "machine": machine()}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
