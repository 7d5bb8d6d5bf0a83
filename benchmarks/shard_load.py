"""The stage sft_data cut into many small shards: what a shard costs, and whether a killed run ends as it would have.

    python -m benchmarks.shard_load [--shards 10 100 1000] [--write docs/measured/load.md]

The same problems each time (benchmarks/sft_data.py: an engine that answers at once, the true path from sampling to the
card), cut into more and more shards, so that a difference in time is the shards' own. Then the largest number again,
killed with SIGKILL in the sampling, in the filters and in between, and started again: the artifact must be the one of
the undisturbed run. Ends with 1 where it is not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.arguments import output_file
from benchmarks.load_page import write_section
from benchmarks.machine import measured_by
from benchmarks.measure import PeakMemory
from grpo.data.records import read_samples

ROOT = Path(__file__).parents[1]
SAMPLES, PER_PROBLEM = 32_000, 8
PROBLEMS = SAMPLES // PER_PROBLEM
KILLED_AFTER = (0.25, 0.45, 0.65, 0.85)
"""Shares of the undisturbed time."""


def shard_count(text: str) -> int:
    """Type of an argument: so many shards of equally many problems."""
    if (count := int(text)) < 1 or PROBLEMS % count:
        raise argparse.ArgumentTypeError(f"{count}: give a number that divides the {PROBLEMS:,} problems")
    return count


def start(home: Path, shards: int) -> subprocess.Popen[str]:
    command = [sys.executable, ROOT / "benchmarks/sft_data.py", "--one", str(SAMPLES), "--work", home]
    command += ["--shard-problems", str(PROBLEMS // shards)]
    paths = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths}
    home.mkdir(parents=True, exist_ok=True)
    with (home / "log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"it ended with {process.returncode}")
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def measure(home: Path, shards: int) -> dict[str, Any]:
    """An undisturbed run: its result, with the most memory of its processes and the most threads of the stage's."""
    process = start(home, shards)
    memory, threads = PeakMemory(process.pid), 0
    while process.poll() is None:
        memory.sample()
        try:
            threads = max(threads, len(os.listdir(f"/proc/{process.pid}/task")))
        except OSError:  # it has ended
            break
        time.sleep(0.1)
    return {"shards": shards, **result(process), "peak_mb": memory.peak_mb, "threads": threads}


def killed(home: Path, shards: int, seconds: float) -> dict[str, Any]:
    """A run that is killed at shares of an undisturbed run's time, and started again until it ends."""
    for share in KILLED_AFTER:
        process = start(home, shards)
        time.sleep(share * seconds)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    return result(start(home, shards))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=shard_count, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--write", type=output_file, metavar="FILE", help="write the section into this page")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for shards in args.shards:
            began = time.monotonic()
            rows.append(measure(Path(folder) / str(shards), shards))
            whole_s = time.monotonic() - began
            print(json.dumps(rows[-1]), flush=True)
        again = killed(Path(folder) / "killed", args.shards[-1], whole_s)
        (artifact,) = (Path(folder) / "killed" / "artifacts" / "sft_data").glob("*/*")
        samples = read_samples(artifact / "samples")
        number = len({(sample.problem_id, sample.number) for sample in samples})
    same = again["digest"] == rows[-1]["digest"] and again["counts"] == rows[-1]["counts"]
    whole = number == len(samples) == SAMPLES
    text = page(rows, same, number, len(samples))
    print(text)
    if args.write:
        write_section(args.write, text)
    return 0 if same and whole else 1


def page(rows: list[dict[str, Any]], same: bool, number: int, total: int) -> str:
    """The figures as a section of a page."""
    first, last = rows[0], rows[-1]
    each_ms = 1000 * (last["seconds"] - first["seconds"]) / max(1, last["shards"] - first["shards"])
    numbers = " ".join(str(row["shards"]) for row in rows)
    lines = [
        f"## {last['shards']:,} shards",
        "",
        measured_by(f"python -m benchmarks.shard_load --shards {numbers}"),
        "",
        f"The stage `sft_data` on the same {PROBLEMS:,} problems and {SAMPLES:,} samples of an engine",
        "that answers at once. Memory is the peak of all processes together.",
        "",
        "| shards | seconds | peak memory, MB | threads of the stage |",
        "|--:|--:|--:|--:|",
        *(f"| {r['shards']:,} | {r['seconds']:.1f} | {r['peak_mb']:.0f} | {r['threads']} |" for r in rows),
        "",
        f"A shard costs {each_ms:.0f} ms of its own. Killed with SIGKILL {len(KILLED_AFTER)} times and started again,",
        f"{last['shards']:,} shards end in {'the same artifact' if same else 'ANOTHER artifact'}: {number:,} of",
        f"{SAMPLES:,} samples, {total - number} double.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
