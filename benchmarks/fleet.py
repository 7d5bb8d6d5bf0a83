"""Sampling over 64 simulated endpoints: throughput against the ideal, the tail, and whether each sample is there once.

    python -m benchmarks.fleet [--samples 1200] [--journal FILE] [--write docs/measured/fleet.md]

Runs the job that samples for `sft_data` (of `python -m grpo.train`, with shards, journals and rewards) against
benchmarks/fleet_simulator.py: without faults, with stragglers, with deaths, and with both. For comparison, the same
with fixed parts: request i belongs to endpoint i modulo 64, as with one process for each address. Ends with 1 if a
sample is missing, double, or not what its seed gives. `--journal` keeps each finished run as a line of JSON; with it a
benchmark that was stopped goes on, and measures only what is missing of this commit on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import fleet_simulator as simulator
from benchmarks.arguments import output_file, write_output
from benchmarks.fixed_parts import FixedParts
from benchmarks.json_lines import add_line, read_lines
from benchmarks.machine import made_with, measured_by
from grpo.data.records import Problem, read_samples, write_rows
from grpo.errors import InputError
from grpo.generation import endpoint
from grpo.sampling.job import run_sampling
from grpo.sampling.shard import seed_of_name
from grpo.train import read_job

ROOT = Path(__file__).parents[1]
PER_PROBLEM, SHARDS, ENDPOINTS = 16, 8, 64
FAULTS = {"none": [], "stragglers": ["stragglers"], "deaths": ["deaths"], "both": ["stragglers", "deaths"]}
COMPARED = ("none", "both")
"""Faults with which fixed parts are measured, too."""
TIMEOUT_S = 120.0  # above the longest request at a slow endpoint


def write_job(folder: Path, samples: int, urls: list[str]) -> Path:
    problems = [
        Problem(f"p{i}", [{"role": "user", "content": f"What is {i} + 1?"}], "1", "number", "reasoning", "en", "sums")
        for i in range(samples // PER_PROBLEM)
    ]
    write_rows(folder / "problems.parquet", problems, Problem)
    engine = {"kind": "endpoint", "urls": urls, "model": "m", "concurrency": simulator.SLOTS, "timeout_s": TIMEOUT_S}
    task = {
        **{"name": "sums", "model": "", "policy": "digest", "problems": [str(folder / "problems.parquet")]},
        **{"samples_per_problem": PER_PROBLEM, "sampling": {"max_new_tokens": simulator.TOKENS_MAX}, "engine": engine},
    }
    job = {
        **{"kind": "sample", "seed": 0, "tasks": [task], "shard_size": -(-len(problems) // SHARDS)},
        **{"hardware": {"device": "cpu"}, "scoring": {"workers": 1}},
        **{name: str(folder / name) for name in ("out", "state")},
        **{name: str(folder / f"{name}.json") for name in ("metrics", "result")},
    }
    for name in ("out", "state"):
        (folder / name).mkdir()
    (folder / "job.json").write_text(json.dumps(job))
    return folder / "job.json"


def run(folder: Path, samples: int, faults: list[str], fixed: bool) -> dict[str, Any]:
    """Figures of one run, in this process, which loads torch only once."""
    folder.mkdir()
    log = folder / "endpoints.json"
    command = [sys.executable, "-m", "benchmarks.fleet_simulator", "--endpoints", str(ENDPOINTS), "--log", log]
    service = subprocess.Popen([*command, "--faults", *faults], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    fleet = endpoint.Fleet
    try:
        assert service.stdout is not None
        job = write_job(folder, samples, json.loads(service.stdout.readline()))
        if fixed:
            endpoint.Fleet = FixedParts  # type: ignore[assignment,misc]
        run_sampling(read_job(job))
    finally:
        endpoint.Fleet = fleet  # type: ignore[misc]
        service.send_signal(signal.SIGTERM)
        service.wait()
    return figures(json.loads(log.read_text())) | counted(folder / "out" / "sums", samples)


def counted(out: Path, samples: int) -> dict[str, int]:
    """Samples that are missing, there twice, or with a text that is not of their seed."""
    done = read_samples(out)
    expected = {(f"p{i}", n) for i in range(samples // PER_PROBLEM) for n in range(PER_PROBLEM)}
    keys = [(each.problem_id, each.number) for each in done]
    wrong = 0
    for each in done:
        seed = (seed_of_name(0, each.problem_id, 0) + each.number) % 2**31
        wrong += each.reasoning.strip() != str(seed) or each.tokens != simulator.tokens_of(seed)
    tokens = sum(each.tokens for each in done)
    return {"lost": len(expected - {*keys}), "double": len(keys) - len({*keys}), "wrong": wrong, "tokens": tokens}


def figures(endpoints: list[dict[str, Any]]) -> dict[str, Any]:
    """What the endpoints did between the first and the last request that they worked on.

    `busy`: share of the time in which at least nine tenths of the endpoints that were up had work. `tail_s`: from the
    first endpoint that has nothing to do any more to the end; those that were ever down do not count, because they may
    have been idle for another reason. `possible`: tokens of endpoints that are always full
    while they are up.
    """
    events = sorted((t, i, work, up) for i, each in enumerate(endpoints) for t, work, up in each["log"])
    times = [t for t, _, work, _ in events if work]
    first, last = times[0], max(t for i, each in enumerate(endpoints) for t in _ends(each))
    state, at = [(0, True)] * len(endpoints), first
    busy_s = possible = slots_s = used_s = 0.0
    for t, index, work, up in [*events, (last, 0, 0, True)]:
        if (until := min(max(t, first), last)) > at:
            alive = [i for i, (_, is_up) in enumerate(state) if is_up]
            busy_s += (until - at) * (sum(state[i][0] > 0 for i in alive) >= 0.9 * len(alive))
            possible += (until - at) * sum(endpoints[i]["rate"] for i in alive)
            slots_s += (until - at) * sum(endpoints[i]["slots"] for i in alive)
            used_s += (until - at) * sum(min(state[i][0], endpoints[i]["slots"]) for i in alive)
            at = until
        state[index] = work, up
    idle = [max(_ends(each)) for each in endpoints if all(up for _, _, up in each["log"])]
    return {
        "seconds": last - first,
        "busy": busy_s / (last - first),
        "slots_used": used_s / slots_s,
        "tail_s": last - min(idle),
        "possible": possible,
        "made": sum(each["done_tokens"] for each in endpoints),
        "refused": sum(each["refused"] for each in endpoints),
        "failed": sum(each["failed"] for each in endpoints),
    }


def _ends(endpoint: dict[str, Any]) -> list[float]:
    """Times at which a request was done, or was given up."""
    log = endpoint["log"]
    return [t for (_, before, _), (t, work, _) in itertools.pairwise(log) if work < before]


def page(rows: list[dict[str, Any]], samples: int) -> str:
    seeds = [seed_of_name(0, f"p{i}", 0) + n for i in range(samples // PER_PROBLEM) for n in range(PER_PROBLEM)]
    longest_s = max(simulator.tokens_of(seed % 2**31) for seed in seeds) * simulator.BASE_S / simulator.SCALE
    loads = [row["load"] for row in rows]
    lines = [
        "# A fleet of endpoints",
        "",
        measured_by(f"python -m benchmarks.fleet --samples {samples}", rows[0]),
        f"The machine's load average before each run: {min(loads):.1f} to {max(loads):.1f}.",
        "",
        f"The sampling job of `sft_data` draws {samples:,} completions ({samples // PER_PROBLEM} problems, {SHARDS}",
        f"shards) from {ENDPOINTS} endpoints that `benchmarks/fleet_simulator.py` simulates on one machine. Each works",
        f"on {simulator.SLOTS} requests at once, which share its speed as in continuous batching. Completions have",
        f"{simulator.TOKENS} tokens in the median (lognormal, sigma {simulator.TOKENS_SIGMA}, at most",
        f"{simulator.TOKENS_MAX:,}); the longest alone takes {longest_s:.0f} s. Times of requests are divided by",
        f"{simulator.SCALE:.0f}; the fleet's own pauses are not, so they weigh more here than they would.",
        "",
        f"Stragglers: {simulator.SLOW} endpoints are {simulator.SLOW_FACTOR:.0f} times slower, and {simulator.HUNG}",
        f"never answer what they get within {simulator.HANGS_S} of the seconds. Deaths: {simulator.DYING} endpoints",
        f"die again and again, for 3 to 10 s; {simulator.FAILING} answer 500 to {simulator.FAILING_SHARE:.0%} of the",
        f"requests; {simulator.SMALL} answer 429 to more than {simulator.SMALL_SLOTS} at once. Fixed parts: request i",
        f"belongs to endpoint i modulo {ENDPOINTS} and is sent there again if it fails, as with one process for each",
        "address.",
        "",
        "| faults | how | seconds | of the ideal | 90 % busy | tail, s | work done twice | lost | double |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['faults']} | {row['how']} | {row['seconds']:.1f} | {row['tokens'] / row['possible']:.0%} | "
            f"{row['busy']:.0%} | {row['tail_s']:.1f} | {row['made'] / row['tokens'] - 1:.1%} | {row['lost']} | "
            f"{row['double']} |"
        )
    lines += [
        "",
        "Of the ideal: tokens of the samples against those that the endpoints would make if each were full whenever it",
        "is up. 90 % busy: share of the time in which at least 90 % of the endpoints that are up have work. Tail: from",
        "the moment when the first endpoint that was never down has nothing left to do until the last sample. Work",
        "done twice: tokens of completions that another copy had overtaken, as a share of the samples' tokens; work on",
        "copies that were cancelled is not in it.",
    ]
    return "\n".join(lines) + "\n"


def finished(journal: Path | None, mark: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """(faults, how) -> the run that the journal has with this mark: number of samples, commit and machine.

    Raises:
        InputError: the journal cannot be read.
    """
    rows = read_lines(journal) if journal else []
    return {(row["faults"], row["how"]): row for row in rows if {name: row.get(name) for name in mark} == mark}


def measure(
    args: argparse.Namespace, mark: dict[str, Any], done: dict[tuple[str, str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """A row for each run: those that are `done`, and the others measured now."""
    rows = []
    for name in args.faults:
        for how in ("fleet", "fixed parts") if name in COMPARED else ("fleet",):
            row = done.get((name, how))
            if row is None:
                load = os.getloadavg()[0]
                with tempfile.TemporaryDirectory() as folder:
                    found = run(Path(folder) / "run", args.samples, FAULTS[name], how != "fleet")
                row = {"faults": name, "how": how, **mark, "load": load, **found}
                print(json.dumps(row), flush=True)
                if args.journal:
                    add_line(args.journal, row)
            rows.append(row)
            if args.write:  # after each run, because all of them take a quarter of an hour
                write_output(args.write, page(rows, args.samples))
    return rows


def sample_count(text: str) -> int:
    """Type of an argument: so many samples of whole problems."""
    if (count := int(text)) < PER_PROBLEM or count % PER_PROBLEM:
        raise argparse.ArgumentTypeError(f"{count}: give a multiple of {PER_PROBLEM}, the samples of a problem")
    return count


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=sample_count, default=1200)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=[*FAULTS])
    parser.add_argument("--journal", type=Path, metavar="FILE", help="finished runs, to go on with")
    parser.add_argument("--write", type=output_file, metavar="FILE", help="write the page")
    args = parser.parse_args(given)
    mark = {"samples": args.samples, **made_with()}
    try:
        done = finished(args.journal, mark)
    except InputError as error:
        parser.error(f"--journal: {error}")
    rows = measure(args, mark, done)
    print(page(rows, args.samples))
    return int(any(row["lost"] or row["double"] or row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
