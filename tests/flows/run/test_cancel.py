"""A person cancels a recipe or a single stage while it trains: it is Cancelled, and no process of it is left, not even
of a trainer that does not hear SIGTERM. A real server and workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.installation import Installation

pytestmark = pytest.mark.slow

LONG = 100_000
BOUND_S = 300.0
"""From the cancel to the end of the last process. A trainer has 20 s to write its checkpoint, Prefect needs some 10 s
to tell a worker and as long again for a recipe's stage; the rest is for a busy machine."""


def recipe(r1flow: Installation, steps: int) -> tuple[str, dict[str, Any]]:
    """The flow run to be cancelled, and that of the stage that trains."""
    before = {run["id"] for run in r1flow.stage("base")}
    id = r1flow.start("train-r1/train-r1", f"base.pretrain.steps={steps}", only="base")
    (stage,) = r1flow.wait(lambda: [run for run in r1flow.stage("base") if run["id"] not in before], "base")
    return id, stage


def single_stage(r1flow: Installation, steps: int) -> tuple[str, dict[str, Any]]:
    form = r1flow.ask("GET", "/deployments/name/base/base")["parameters"]["config"]
    id = r1flow.start_stage("base", pretrain={**form["pretrain"], "steps": steps}, documents=6000)
    return id, r1flow.run(id)


def nothing(trainers: list[int]) -> None:
    """The trainer hears SIGTERM."""


def stop(trainers: list[int]) -> None:
    """A stopped process does not die of SIGTERM, as one that ignores it does not."""
    for pid in trainers:
        os.kill(pid, signal.SIGSTOP)


CASES = [(recipe, nothing), (recipe, stop), (single_stage, nothing), (single_stage, stop)]


@pytest.mark.parametrize(
    ("number", "start", "disturb"),
    [(number, *case) for number, case in enumerate(CASES)],
    ids=[f"{start.__name__}-{disturb.__name__}" for start, disturb in CASES],
)
def test_no_process_survives_a_cancel(
    r1flow: Installation,
    number: int,
    start: Callable[..., tuple[str, dict[str, Any]]],
    disturb: Callable[[list[int]], None],
) -> None:
    id, stage = start(r1flow, LONG + number)
    r1flow.wait(lambda: r1flow.steps("base") >= 2, "its first steps")
    engine, trainers = r1flow.process_of(stage["id"]), r1flow.trainers()
    assert trainers
    disturb(trainers)
    began = time.monotonic()
    r1flow.cancel(id)
    r1flow.wait(lambda: not {engine, *trainers, *r1flow.trainers()} & r1flow.running(), "the end of its processes")
    assert time.monotonic() - began < BOUND_S
    for run in {id, stage["id"]}:
        r1flow.wait_for(run, "Cancelled")
    time.sleep(5)
    assert not r1flow.trainers()  # nobody starts it again
    r1flow.assert_nothing_runs_without_a_process()
    for work in r1flow.home.glob("work/base-*/trainer/metrics.jsonl"):  # so that the next case counts its own steps
        work.unlink()
