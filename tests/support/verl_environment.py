"""Tests with a real verl: where it is installed, and what lets it train on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build/verl/bin/python"
needs_verl = pytest.mark.skipif(not PYTHON.exists(), reason="verl is not in build/verl; `make engines` installs it")
ON_CPU = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # its engine for CUDA, which asks the platform for everything
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/support'}",  # site-packages of verl has its own `tests`
    "OMP_NUM_THREADS": "1",
}
"""Environment variables for r1flow's processes, which verl's inherit."""

SAMPLING_ON_CPU = ON_CPU | {
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu,verl_sampling_on_cpu",
    "CUDA_VISIBLE_DEVICES": "0,1",  # as many devices as Ray is told
}
"""The same for RL."""
SAMPLING_OPTIONS = [
    "actor_rollout_ref.rollout.name=transformers",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
]
"""`hardware.trainer.options` for RL on a CPU."""
RL_OPTIONS = [*SAMPLING_OPTIONS, "+ray_kwargs.ray_init.num_gpus=2", "ray_kwargs.ray_init.num_cpus=8"]
"""The same for two processes on one machine, which Ray finds no devices on."""
ONE_DEVICE = {"RAY_OVERRIDE_RESOURCES": '{"GPU": 1, "CPU": 8}'}
"""Variable that tells Ray so where it starts by itself."""
