"""Many calls of one function, each as a Prefect task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

_R = TypeVar("_R")


def run_numbered(
    function: Callable[[int], _R],
    name: str,
    run_names: Sequence[Callable[[], str]],
    at_once: int,
    on_progress: Callable[[int, int], None],
) -> list[_R]:
    """Results of function(0), function(1) and so on, one for each of `run_names`. `on_progress` is told how many are
    there, and how many there will be.

    At most `at_once` are submitted at a time, because Prefect starts a thread for each waiting task, and a set of a
    million samples has thousands of shards. With 1 they run in the caller's thread.
    """
    from prefect import task  # not for `r1 plan`, which loads the modules of all stages
    from prefect.cache_policies import NO_CACHE

    numbered = task(name=name, cache_policy=NO_CACHE)(function)
    named = [numbered.with_options(task_run_name=run_name) for run_name in run_names]
    results: list[_R] = []
    for start in range(0, len(named), at_once):
        batch = list(enumerate(named[start : start + at_once], start))
        futures = [run.submit(number) for number, run in batch] if at_once > 1 else []
        for number, run in batch:
            results.append(futures[number - start].result() if futures else run(number))
            on_progress(len(results), len(named))
    return results
