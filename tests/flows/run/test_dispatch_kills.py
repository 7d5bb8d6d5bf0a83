"""Killed in turn during a stage: the flow, its worker, both, the recipe, the servers. Each time the same artifacts."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.installation import Installation, artifacts
from tests.support.r1 import R1

pytestmark = pytest.mark.slow

STEPS = 300
SETS = [f"base.pretrain.steps={STEPS}", "base.pretrain.save_every=25"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Seed -> the digest of `base` as one process makes it that nobody disturbs."""
    r1 = R1(tmp_path_factory.mktemp("calm"))

    def digest(seed: int) -> str:
        sets = [part for value in SETS for part in ("--set", value)]
        result = r1.tiny("run", *sets, "--only", "base", "--seed", str(seed))
        key = result["stages"][0]["key"]
        return artifacts(r1.home)[f"base/{key}/1"]

    return digest


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it went with another
            os.kill(pid, signal.SIGKILL)


def the_flow(r1flow: Installation, recipe: str, stage: str) -> None:
    kill(r1flow.process_of(stage))


def its_worker(r1flow: Installation, recipe: str, stage: str) -> None:
    kill(r1flow.pid("worker-r1-gpu-0"))


def both(r1flow: Installation, recipe: str, stage: str) -> None:
    kill(r1flow.pid("worker-r1-gpu-0"), r1flow.process_of(stage))


def the_recipe(r1flow: Installation, recipe: str, stage: str) -> None:
    kill(r1flow.process_of(recipe))


def the_recipe_and_its_worker(r1flow: Installation, recipe: str, stage: str) -> None:
    kill(r1flow.pid("worker-r1-cpu"), r1flow.process_of(recipe))


def prefect(r1flow: Installation, recipe: str, stage: str) -> None:
    kill(r1flow.pid("prefect"))


def mlflow(r1flow: Installation, recipe: str, stage: str) -> None:
    kill(r1flow.pid("mlflow"))


def the_installation(r1flow: Installation, recipe: str, stage: str) -> None:
    """As a power cut does; `r1 up` is the one command."""
    kill(*r1flow.running())
    r1flow.up()


VICTIMS = [the_flow, its_worker, both, the_recipe, the_recipe_and_its_worker, prefect, mlflow, the_installation]


@pytest.mark.parametrize(("seed", "victim"), list(enumerate(VICTIMS)), ids=[victim.__name__ for victim in VICTIMS])
def test_killed_the_recipe_ends_with_the_same_artifact(
    r1flow: Installation, undisturbed: Callable[[int], str], seed: int, victim: Callable[..., Any]
) -> None:
    recipe = r1flow.start("train-r1/train-r1", *SETS, only="base", seed=seed)
    before = {run["id"] for run in r1flow.stage("base")}
    (stage,) = r1flow.wait(
        lambda: [r for r in r1flow.stage("base") if r["id"] not in before and r["state"]["type"] == "RUNNING"], "base"
    )
    r1flow.wait(lambda: r1flow.steps("base") >= 60, "its steps")
    victim(r1flow, recipe, stage["id"])
    r1flow.wait_for(recipe, "Completed")
    tags = next(tag for tag in stage["tags"] if tag.startswith("r1flow.key:"))
    key = tags.removeprefix("r1flow.key:")
    made = {name: digest for name, digest in artifacts(r1flow.home).items() if key in name}
    assert made == {f"base/{key}/1": undisturbed(seed)}
    (parent,) = r1flow.tracked_runs("r1flow.flow_run", recipe)
    (ended,) = [run for run in r1flow.tracked_runs("mlflow.parentRunId", parent["run_id"]) if run["status"] != "KILLED"]
    assert (parent["status"], ended["status"]) == ("FINISHED", "FINISHED")
    assert not list(r1flow.home.glob("work/*"))
    r1flow.assert_nothing_runs_without_a_process()
