"""The process reward model from its form: a deployment that a server and a worker run, and what a second run does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flows.stages.process_reward_model import STAGE
from tests.support.installation import Installation, artifacts

pytestmark = pytest.mark.slow

FORM = {"problems": 40, "samples_per_problem": 2}


@pytest.fixture(scope="module")
def trained(r1flow: Installation) -> dict[str, Any]:
    """The flow run of the form, after the stages before it were made."""
    for stage in ("problems", "base", "cold_start_data", "cold_start_sft"):
        r1flow.tiny("run", "--only", stage)
    return r1flow.wait_for(r1flow.start_stage(STAGE.name, **FORM), "Completed")


def made(r1flow: Installation) -> dict[str, str]:
    return {name: digest for name, digest in artifacts(r1flow.home).items() if name.startswith(STAGE.name)}


def test_the_form_trains_it_on_the_pool_of_gpus(r1flow: Installation, trained: dict[str, Any]) -> None:
    assert trained["work_pool_name"] == "r1-gpu"
    ((name, _),) = made(r1flow).items()
    folder = r1flow.home / "artifacts" / name
    manifest = json.loads((folder / "manifest.json").read_text())
    config = manifest["config"]
    assert (config["problems"], config["samples_per_problem"]) == (40, 2)
    assert manifest["counts"]["train"] > 0 and 0 <= manifest["metrics"]["held_out_accuracy"] <= 1
    assert (folder / "model" / "config.json").is_file()
    (tracked,) = r1flow.tracked_runs("r1flow.key", name.split("/")[1], experiment="single-stages")
    assert tracked["status"] == "FINISHED"


def test_the_same_form_again_reuses_it_and_so_does_the_command(r1flow: Installation, trained: dict[str, Any]) -> None:
    before = made(r1flow)
    r1flow.wait_for(r1flow.start_stage(STAGE.name, **FORM), "Reused")
    sets = [part for field, value in FORM.items() for part in ("--set", f"{STAGE.name}.{field}={value}")]
    (stage,) = r1flow.tiny("run", "--flow", "process_supervision", "--only", STAGE.name, *sets)["stages"]
    assert stage["status"] == "reused" and [*before] == [f"{STAGE.name}/{stage['key']}/1"]
    assert made(r1flow) == before
