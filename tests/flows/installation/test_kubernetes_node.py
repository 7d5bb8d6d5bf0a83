"""The pods of a Kubernetes job find the first of them, which runs the flow; processes stand for pods here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.installation.kubernetes_node import rendezvous_variables
from grpo.errors import InputError
from tasks.trainer.rendezvous import Rendezvous


def of_pod(index: str, pods: str = "4", pod: str = "sft-calm-otter-x7k2p") -> dict[str, str]:
    return {"R1FLOW_PODS": pods, "JOB_COMPLETION_INDEX": index, "HOSTNAME": f"{pod}-{index}"}


def test_all_pods_of_a_job_meet_at_its_first(tmp_path: Path) -> None:
    places = [rendezvous_variables(of_pod(index)) for index in ("0", "3", "10")]
    met = [Rendezvous.of_environment(tmp_path, place) for place in places]
    assert [(m.endpoint, m.rank) for m in met if m] == [
        ("sft-calm-otter-x7k2p-0.r1flow:29500", rank) for rank in (0, 3, 10)
    ]


def test_a_job_of_one_pod_has_no_rendezvous() -> None:
    assert rendezvous_variables(of_pod("0", pods="1")) == {}
    assert rendezvous_variables({"HOSTNAME": "laptop"}) == {}


@pytest.mark.parametrize("wrong", [{"JOB_COMPLETION_INDEX": ""}, {"JOB_COMPLETION_INDEX": "2"}, {"HOSTNAME": "laptop"}])
def test_pods_without_numbers_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InputError, match="completionMode Indexed"):
        rendezvous_variables(of_pod("1") | wrong)


def run(index: str, pods: str, home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **of_pod(index, pods), "R1FLOW_HOME": str(home)}
    module = [sys.executable, "-m", "flows.installation.kubernetes_node"]
    return subprocess.run([*module, *command], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("pods", ["1", "2"])
def test_the_first_pod_runs_the_flow_and_has_its_exit_code(tmp_path: Path, pods: str) -> None:
    show = "import os, sys; print(os.environ.get('PET_RDZV_ENDPOINT')); sys.exit(7)"
    done = run("0", pods, tmp_path, sys.executable, "-c", show)
    assert done.returncode == 7, done.stderr
    assert done.stdout.strip() == {"1": "None", "2": "sft-calm-otter-x7k2p-0.r1flow:29500"}[pods]
