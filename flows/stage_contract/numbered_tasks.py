"""Many calls of one function, each as a Prefect task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

_R = TypeVar("_R")


def run_numbered(
    function: Callable[[int], _R], name: str, run_names: Sequence[Callable[[], str]], at_once: int
) -> list[_R]:
    """Results of function(0), function(1) and so on, one for each of `run_names`.

    At most `at_once` are submitted at a time, because Prefect starts a thread for each waiting task, and a set of a
    million samples has thousands of shards. With 1 they run in the caller's thread.
    """
    from prefect import task  # not for `r1 plan`, which loads the modules of all stages
    from prefect.cache_policies import NO_CACHE

    numbered = task(name=name, cache_policy=NO_CACHE)(function)
    named = [numbered.with_options(task_run_name=run_name) for run_name in run_names]
    if at_once == 1:
        return [run(number) for number, run in enumerate(named)]
    results: list[_R] = []
    for start in range(0, len(named), at_once):
        futures = [run.submit(start + i) for i, run in enumerate(named[start : start + at_once])]
        results += [future.result() for future in futures]
    return results
