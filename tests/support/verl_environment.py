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
