"""How fast rewards are computed: 10,000 completions with more workers, and with some that take long.

python benchmarks/rewards.py [--completions 10000] [--rounds 3] [--workers 1 2]
    [--output docs/measured/rewards.md]

The rounds alternate between the cases, and the median counts: what else the machine does then meets all alike.
"""

from __future__ import annotations

import argparse
import multiprocessing
import operator
import os
import statistics
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import Any

from arguments import at_least, output_file, shown, write_output
from machine import measured_by

from grpo.data.records import Problem
from grpo.processes.pool import Pool
from grpo.rewards.verifiers import verify
from grpo.sandbox.run import Limits, protections, run

SLOW_SHARE, SLOW_S = 0.01, 0.2
WARM_UP = 200
"""Items before the clock starts: the workers import what they need."""


def problem(i: int) -> Problem:
    """A different fraction each time, so that nothing is remembered; the answer is it before it is cancelled."""
    gold = f"\\frac{{{2 * i + 1}}}{{14}}"
    return Problem(str(i), [{"role": "user", "content": "question"}], gold, "math", "reasoning", "en", "benchmark")


def answer(i: int) -> str:
    return f"\\frac{{{4 * i + 2}}}{{28}}"


def submit(pool: Pool, count: int, slow_share: float) -> tuple[list[Future[Any]], list[Future[Any]]]:
    """Fast and slow items, the slow ones spread evenly among the others."""
    every = round(1 / slow_share) if slow_share else 0
    fast, slow = [], []
    for i in range(count):
        if every and i % every == every // 2:
            slow.append(pool.submit(time.sleep, SLOW_S))
        else:
            fast.append(pool.submit(verify, problem(i), answer(i)))
    return fast, slow


def score(pool: Pool, count: int, slow_share: float) -> float:
    """Seconds until all but the slow items are scored."""
    began = time.perf_counter()
    fast, slow = submit(pool, count, slow_share)
    wait(fast)
    seconds = time.perf_counter() - began
    wait(slow)
    assert all(future.result() == 1.0 for future in fast)
    return seconds


def trivial(pool: Pool, count: int) -> float:
    began = time.perf_counter()
    wait([pool.submit(operator.add, i, 1) for i in range(count)])
    return time.perf_counter() - began


def part(first: int, beyond: int) -> float:
    return sum(verify(problem(i), answer(i)) for i in range(first, beyond))


def plain(executor: ProcessPoolExecutor, workers: int, count: int) -> float:
    """Seconds for the fast items with one long task a process and nothing sent: what the machine can give."""
    began = time.perf_counter()
    edges = [count * i // workers for i in range(workers + 1)]
    assert sum(executor.map(part, edges, edges[1:])) == count
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--completions", type=at_least(1), default=10_000)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--workers", type=at_least(1), nargs="+", default=sorted({1, 2, os.cpu_count() or 1}))
    parser.add_argument("--output", type=output_file)
    options = parser.parse_args()
    count = options.completions
    pools = {workers: Pool(workers, 60.0, 4 << 30) for workers in options.workers}
    spawn = multiprocessing.get_context("spawn")
    executors = {workers: ProcessPoolExecutor(workers, mp_context=spawn) for workers in options.workers}
    for workers, pool in pools.items():
        score(pool, WARM_UP * workers, 0.0)
        plain(executors[workers], workers, WARM_UP * workers)
    times: dict[tuple[int, str], list[float]] = {}
    for _ in range(options.rounds):
        for workers, pool in pools.items():
            times.setdefault((workers, "trivial"), []).append(trivial(pool, count))
            times.setdefault((workers, "plain"), []).append(plain(executors[workers], workers, count))
            times.setdefault((workers, "all fast"), []).append(score(pool, count, 0.0))
            times.setdefault((workers, "some slow"), []).append(score(pool, count, SLOW_SHARE))
    for workers, pool in pools.items():
        pool.close()
        executors[workers].shutdown()
    took = {case: statistics.median(seconds) for case, seconds in times.items()}
    load = os.getloadavg()[0]
    lines = [
        "# How fast rewards are computed",
        "",
        measured_by(f"python benchmarks/rewards.py{shown(sys.argv[1:], paths=['--output'])}"),
        f"Median of {options.rounds} rounds.",
    ]
    lines.append(f"{count:,} completions; the machine's load at the end was {load:.1f}.\n")
    lines.append(
        "| workers | sum of two numbers, items/s | math verifier, items/s | speed-up | plain processes | speed-up |"
    )
    lines.append("|---|---|---|---|---|---|")
    for workers in options.workers:
        cells = [f"{count / took[workers, 'trivial']:,.0f}"]
        for case in ("all fast", "plain"):
            seconds = took[workers, case]
            cells += [f"{count / seconds:,.0f}", f"{took[options.workers[0], case] / seconds:.2f}"]
        lines.append(f"| {workers} | {' | '.join(cells)} |")
    slow = round(count * SLOW_SHARE)
    lines.append(f"\n{slow} of the {count:,} take {1000 * SLOW_S:.0f} ms each. Seconds until the others are done:\n")
    lines.append("| workers | without slow ones | with | the slow ones alone, over the workers |\n|---|---|---|---|")
    for workers in options.workers:
        with_, held = took[workers, "some slow"], slow * SLOW_S / workers
        lines.append(f"| {workers} | {took[workers, 'all fast']:.2f} | {with_:.2f} | {held:.2f} |")
    lines.append(f"\nA sandboxed program that does nothing: {1000 * sandboxed(20):.0f} ms. Walls: {protections()}")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output:
        write_output(options.output, text)


def sandboxed(count: int) -> float:
    """Median seconds of one run."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        assert run("pass", "", Limits()).kind == "ok"
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
