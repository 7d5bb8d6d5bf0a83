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
from tests.support.verl_environment import ON_CPU, PYTHON, needs_verl

pytestmark = [pytest.mark.slow, needs_verl]

STAGE = "cold_start_sft"
BY_VERL = [
    *("--set", f'{STAGE}.hardware.trainer={{kind="verl",python="{PYTHON}"}}'),
    *("--set", f"{STAGE}.hardware.processes=2", "--set", f'{STAGE}.hardware.device="cpu"'),
    *("--set", f"{STAGE}.save_every=3", "--set", f"{STAGE}.max_steps=8"),
    *("--set", f"{STAGE}.optimizer.warmup_steps=0"),  # with a warm-up, verl's decay is a step ahead
]


@dataclass
class OnCpu(R1):
    """r1, whose verl can train on a CPU."""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **ON_CPU}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> OnCpu:
    """With everything that the stage reads."""
    r1 = OnCpu(tmp_path_factory.mktemp("home"))
    for stage in ("problems", "base", "cold_start_data"):
        r1.tiny("run", "--only", stage)
    return r1


def stage_of(result: dict[str, Any]) -> dict[str, Any]:
    return next(stage for stage in result["stages"] if stage["name"] == STAGE)


def manifest_of(home: Path, stage: dict[str, Any]) -> dict[str, Any]:
    (path,) = home.glob(f"artifacts/{STAGE}/{stage['key']}/*/manifest.json")
    return json.loads(path.read_text())


def test_a_stage_by_verl_is_killed_resumed_recorded_and_reused(home: OnCpu) -> None:
    ours = manifest_of(home.home, stage_of(home.tiny("run", *BY_VERL[4:], "--only", STAGE)))
    smaller = [part for value in SMALLER for part in ("--set", value)]
    arguments = ["run", "tiny", *smaller, *BY_VERL, "--only", STAGE]
    kill_when(home, arguments, lambda: steps(home.home, STAGE) >= 5)
    made = stage_of(home.tiny("run", *BY_VERL, "--only", STAGE))
    assert made["status"] == "ran"
    theirs = manifest_of(home.home, made)
    assert theirs["key"] != ours["key"]  # another engine is another artifact
    assert theirs["steps_completed"] == ours["steps_completed"] == 8
    assert theirs["counts"] == ours["counts"]
    assert theirs["metrics"]["loss"] == pytest.approx(ours["metrics"]["loss"], rel=1e-3)
    client = mlflow.MlflowClient(f"sqlite:///{home.home}/mlflow.db")
    history = client.get_metric_history(theirs["mlflow_run_id"], "loss")
    assert [point.step for point in history] == list(range(1, 9))
    assert stage_of(home.tiny("run", *BY_VERL, "--only", STAGE))["status"] == "reused"
    elsewhere = [part.replace("/bin/python", "/bin/../bin/python") for part in BY_VERL]
    assert stage_of(home.tiny("run", *elsewhere, "--only", STAGE))["status"] == "reused"  # its place is not in the key
    home("verify", "--repair")  # Prefect's record of the run that was killed
    assert home("verify").returncode == 0
    left = subprocess.run(["pgrep", "-f", str(home.home)], capture_output=True, text=True).stdout
    assert not left
