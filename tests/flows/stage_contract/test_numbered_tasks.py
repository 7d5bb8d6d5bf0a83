"""Many calls of one function, each as a Prefect task."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from prefect import flow
from prefect.context import TaskRunContext
from prefect.testing.utilities import prefect_test_harness

from flows.stage_contract.numbered_tasks import run_numbered


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=None):  # the setting of conftest.py
        yield


@pytest.mark.parametrize(("at_once", "threads"), [(1, 1), (2, 2)])
def test_results_in_order_with_a_name_each_and_no_more_at_once_than_allowed(at_once: int, threads: int) -> None:
    ran: dict[int, str] = {}
    told: list[tuple[int, int]] = []
    working, most = 0, 0
    lock = threading.Lock()
    together = threading.Barrier(threads)

    def square(number: int) -> int:
        nonlocal working, most
        context = TaskRunContext.get()
        assert context is not None
        ran[number] = context.task_run.name
        with lock:
            working += 1
            most = max(most, working)
        together.wait(60)
        with lock:
            working -= 1
        return number * number

    def named(number: int) -> Callable[[], str]:
        return lambda: f"filter {number} of 4"

    @flow
    def all_of_them() -> list[int]:
        names = [named(number) for number in range(4)]
        return run_numbered(square, "filter", names, at_once, lambda done, of: told.append((done, of)))

    assert all_of_them() == [0, 1, 4, 9]
    assert ran == {number: f"filter {number} of 4" for number in range(4)} and most == threads
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
