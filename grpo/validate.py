"""Checks that every gold answer earns full reward from its own verifier.

``python -m grpo.validate PROBLEMS.parquet ...``. A verifier that rejects the gold answer teaches a policy to avoid it,
and nothing in training shows that.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from grpo.data.records import Problem, read_problems
from grpo.errors import InputError
from grpo.processes.pool import Failure, Pool
from grpo.rewards import verifiers
from grpo.rewards.judged import JUDGED

IN_FLIGHT = 1000
"""Maximum number of problems in flight; bounds memory only."""
TIME_LIMIT_S, MEMORY_BYTES = 10.0, 4_000_000_000
"""Default limits of the check of one answer."""


@dataclass(frozen=True)
class FailedAnswer:
    """A problem whose gold answer does not earn full reward, with the actual outcome."""

    problem_id: str
    verifier: str
    what: str


def checkable(problem: Problem) -> bool:
    """Whether there is a gold answer to check; false for general prompts, and for tests and scorers without one."""
    unanswered = problem.verifier in ("code", "reasoning_gym") and not problem.answer.strip()
    return problem.verifier not in ("none", *JUDGED) and not unanswered


def validate(
    problems: Sequence[Problem],
    workers: int | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    memory_bytes: int = MEMORY_BYTES,
    done: Callable[[], object] = lambda: None,
) -> list[FailedAnswer]:
    """Scores each gold answer in a killable process. Returns the failures, in problem order.

    Skips problems that are not `checkable`. `workers`: None for one per core. Programs may take as long as their tests
    allow, if that is more than `time_limit_s`. Calls `done` after each checked problem.
    """
    findings: list[FailedAnswer] = []
    waiting: deque[tuple[Problem, Future[Any]]] = deque()
    if not (count := sum(map(checkable, problems))):
        return findings  # without starting processes
    left = filter(checkable, problems)
    with Pool(workers or min(count, os.cpu_count() or 1), time_limit_s, memory_bytes) as pool:
        while True:
            for problem in itertools.islice(left, IN_FLIGHT - len(waiting)):
                limit_s = verifiers.time_limit_s(problem)
                waiting.append((problem, pool.submit_within(limit_s, verifiers.verify_gold, problem)))
            if not waiting:
                return findings
            problem, future = waiting.popleft()
            if what := _what_is_wrong(problem, future):
                findings.append(FailedAnswer(problem.id, problem.verifier, what))
            done()


def _what_is_wrong(problem: Problem, future: Future[Any]) -> str | None:
    try:
        score = future.result()
    except InputError as error:  # such as an unknown verifier: a fault of this problem, not a reason to stop
        return str(error)
    if isinstance(score, Failure):
        return f"{score.kind}: {score.message}"
    return None if score == 1.0 else f"the gold answer {_short(problem.answer)!r} scores {score:.4g}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the files. Returns the exit code: 0 if every gold answer passes, 2 if one fails or the input is bad."""
    parser = argparse.ArgumentParser(prog="python -m grpo.validate", description="Checks every gold answer.")
    parser.add_argument("problems", nargs="+", type=Path, help="parquet files of problems, or folders of them")
    parser.add_argument("--workers", type=int, help="processes (default: one a core)")
    parser.add_argument("--time-limit-s", type=float, default=TIME_LIMIT_S, help="seconds for one answer (default: 10)")
    parser.add_argument("--memory-gb", type=float, default=4.0, help="memory of one process (default: 4)")
    parser.add_argument("--show", type=int, default=20, help="failing problems to print (default: 20)")
    args = parser.parse_args(arguments)
    try:
        problems = read_problems(args.problems)
        findings = _with_progress_bar(problems, args)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _report(problems, findings, args.show)
    return 2 if findings else 0


def _with_progress_bar(problems: Sequence[Problem], args: argparse.Namespace) -> list[FailedAnswer]:
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=sum(map(checkable, problems)))
        memory_bytes = int(args.memory_gb * 1e9)
        return validate(problems, args.workers, args.time_limit_s, memory_bytes, lambda: progress.advance(task))


def _report(problems: Sequence[Problem], findings: Sequence[FailedAnswer], show: int) -> None:
    for finding in findings[:show]:
        print(f"{finding.problem_id}  {finding.verifier}  {finding.what}")
    if len(findings) > show:
        print(f"... and {len(findings) - show} more (--show)")
    checked = Counter(problem.verifier for problem in problems if checkable(problem))
    failed = Counter(finding.verifier for finding in findings)
    skipped = Counter(problem.verifier for problem in problems if not checkable(problem))
    print(f"{'verifier':<14} {'checked':>8} {'failed':>8} {'skipped':>8}")
    for verifier in sorted(checked | skipped):
        print(f"{verifier:<14} {checked[verifier]:>8} {failed[verifier]:>8} {skipped[verifier]:>8}")


if __name__ == "__main__":
    sys.exit(main())
