"""A job in an environment that has this library through `grpo.other_environments` alone."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from grpo.other_environments import ALONE
from tests.support.environments import other_environment
from tests.support.job_runner import ENVIRONMENT, RL, metrics, write_job


@pytest.mark.system
def test_a_job_and_its_reward_workers_run_there(tmp_path: Path, rl_fields: dict[str, Any]) -> None:
    python = other_environment(tmp_path / "env")
    outside = {"env": ENVIRONMENT | {"PYTHONPATH": ""}, "cwd": "/", "capture_output": True, "text": True}
    assert "No module named 'grpo'" in subprocess.run([python, "-c", "import grpo"], **outside).stderr
    # A reward that says where it runs, and the packages that it finds beside the library.
    reward = """
import importlib.util, sys

def reward(problem, response):
    assert importlib.util.find_spec("flows") is None
    return float(len(sys.prefix))
"""
    (tmp_path / "where.py").write_text(reward)
    settings = {**RL, "steps": 1, "rewards": {"where:reward": 1.0}}
    job = write_job(tmp_path, "rl", **{**rl_fields, "settings": settings})
    paths = f"{ALONE}:{tmp_path}"
    done = subprocess.run(
        [python, "-m", "grpo.train", str(job)], **{**outside, "env": ENVIRONMENT | {"PYTHONPATH": paths}}
    )
    assert done.returncode == 0, done.stderr
    assert [record["reward"] for record in metrics(tmp_path)] == [len(str(tmp_path / "env"))]
