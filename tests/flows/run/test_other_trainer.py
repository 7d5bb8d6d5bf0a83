"""A stage that verl trains, as its users run it: `r1 run`, killed in the middle, resumed, recorded and reused."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pytest

from tests.flows.run.test_kill import kill_when, steps
from tests.support.r1 import R1, SMALLER
from tests.support.verl_environment import PYTHON, RL_OPTIONS, SAMPLING_ON_CPU, needs_verl

pytestmark = [pytest.mark.slow, needs_verl]

SFT = [
    'hardware.trainer={{kind="verl",python="{python}"}}',
    "save_every=3",
    "max_steps=8",
    "optimizer.warmup_steps=0",  # with a warm-up, verl's decay is a step ahead
]
STAGES = {
    "cold_start_sft": SFT,
    "reasoning_rl": [
        f'hardware.trainer={{{{kind="verl",python="{{python}}",options={json.dumps(RL_OPTIONS)}}}}}',
        "save_every=2",
        "steps=8",
    ],
    "sft": SFT,
}
"""What is set for a stage; the last ones also where this library trains it."""


def set_for(stage: str, values: list[str], python: str = str(PYTHON)) -> list[str]:
    return [part for value in values for part in ("--set", f"{stage}.{value}".format(python=python))]


def by_verl(stage: str, python: str = str(PYTHON)) -> list[str]:
    return set_for(stage, ["hardware.processes=2", 'hardware.device="cpu"', *STAGES[stage]], python)


@dataclass
class OnCpu(R1):
    """r1, whose verl can train on a CPU."""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **SAMPLING_ON_CPU}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> OnCpu:
    """With everything that the stages read."""
    r1 = OnCpu(tmp_path_factory.mktemp("home"))
    for stage in ("problems", "base", "cold_start_data", "cold_start_sft"):
        r1.tiny("run", "--only", stage)
    return r1


def stage_of(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(stage for stage in result["stages"] if stage["name"] == name)


def manifest_of(home: Path, stage: dict[str, Any]) -> dict[str, Any]:
    (path,) = home.glob(f"artifacts/{stage['name']}/{stage['key']}/*/manifest.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("stage", ["cold_start_sft", "reasoning_rl"])
def test_a_stage_by_verl_is_killed_resumed_recorded_and_reused(home: OnCpu, stage: str) -> None:
    own = set_for(stage, STAGES[stage][1:])
    ours = manifest_of(home.home, stage_of(home.tiny("run", *own, "--only", stage), stage))
    smaller = [part for value in SMALLER for part in ("--set", value)]
    kill_when(home, ["run", "tiny", *smaller, *by_verl(stage), "--only", stage], lambda: steps(home.home, stage) >= 5)
    made = stage_of(home.tiny("run", *by_verl(stage), "--only", stage), stage)
    assert made["status"] == "ran"
    theirs = manifest_of(home.home, made)
    assert theirs["key"] != ours["key"]  # another engine is another artifact
    assert theirs["steps_completed"] == ours["steps_completed"] == 8
    assert theirs["counts"] == ours["counts"]
    common = {"loss"} if stage == "cold_start_sft" else {"reward", "reward_format", "kl", "completion_tokens"}
    assert common <= theirs["metrics"].keys() & ours["metrics"].keys()
    if stage == "cold_start_sft":
        assert theirs["metrics"]["loss"] == pytest.approx(ours["metrics"]["loss"], rel=1e-3)
    client = mlflow.MlflowClient(f"sqlite:///{home.home}/mlflow.db")
    history = client.get_metric_history(theirs["mlflow_run_id"], "loss")
    assert [point.step for point in history] == list(range(1, 9))
    assert stage_of(home.tiny("run", *by_verl(stage), "--only", stage), stage)["status"] == "reused"
    elsewhere = by_verl(stage, str(PYTHON.parent / "../bin" / PYTHON.name))
    assert stage_of(home.tiny("run", *elsewhere, "--only", stage), stage)["status"] == "reused"  # not in the key
    home("verify", "--repair")  # Prefect's record of the run that was killed
    assert home("verify").returncode == 0
    left = subprocess.run(["pgrep", "-f", str(home.home)], capture_output=True, text=True).stdout
    assert not left


def test_a_whole_recipe_of_which_verl_trains_two_stages(home: OnCpu) -> None:
    """Killed in the middle of each of them; stages before and after are this library's."""
    verl = ["reasoning_rl", "sft"]
    # The SFT data has 24 sequences: in batches of 2 they are enough for 8 steps.
    settings = [*(part for stage in verl for part in by_verl(stage)), "--set", "sft.batch_size=2"]
    smaller = [part for value in SMALLER for part in ("--set", value)]
    for stage in verl:
        kill_when(home, ["run", "tiny", *smaller, *settings], lambda stage=stage: steps(home.home, stage) >= 5)
    first = home.tiny("run", *settings)
    client = mlflow.MlflowClient(f"sqlite:///{home.home}/mlflow.db")
    for stage in verl:
        made = manifest_of(home.home, stage_of(first, stage))
        assert made["steps_completed"] == 8
        history = client.get_metric_history(made["mlflow_run_id"], "loss")
        assert [point.step for point in history] == list(range(1, 9))
    assert {stage["name"] for stage in first["stages"] if stage["status"] == "ran"} >= {"sft", "alignment_rl", "report"}
    second = home.tiny("run", *settings)
    assert {stage["status"] for stage in second["stages"]} == {"reused"}
    assert [stage["key"] for stage in second["stages"]] == [stage["key"] for stage in first["stages"]]
    home("verify", "--repair")
    assert home("verify").returncode == 0
