"""grpo/ alone: an environment with its requirements.txt, and neither Prefect nor MLflow."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.job_runner import RL, ROOT, result, write_job

REQUIREMENTS = ROOT / "grpo" / "requirements.txt"


def in_bare(folder: Path, *command: str | Path, expected: int = 0) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([folder / "venv/bin/python", *command], cwd=folder, env=environment, capture_output=True)
    assert done.returncode == expected, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.slow
def test_grpo_trains_where_neither_prefect_nor_mlflow_is_installed(base, problems, tmp_path):
    constraints = ROOT / "constraints.txt"
    torch = re.search(r"^torch==\S+$", constraints.read_text(), re.MULTILINE)[0]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [tmp_path / "venv/bin/pip", "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, "--constraint", constraints, "--requirement", REQUIREMENTS], check=True)
    shutil.copytree(ROOT / "grpo", tmp_path / "grpo", ignore=shutil.ignore_patterns("__pycache__"))
    for package in ("prefect", "mlflow", "pandas", "datasets"):
        in_bare(tmp_path, "-c", f"import {package}", expected=1)
    in_bare(tmp_path, "-m", "grpo.validate", problems)
    settings = {**RL, "steps": 2, "rewards": {"accuracy": 1, "format": 1, "language": 1}}
    fields = {"settings": settings, "model": base / "out", "problems": [problems], "template": "r1_zero"}
    in_bare(tmp_path, "-m", "grpo.train", write_job(tmp_path / "job", "rl", **fields))
    assert result(tmp_path / "job")["steps_completed"] == 2


def test_the_requirements_name_what_grpo_imports():
    """Every package that a module of grpo/ imports is required; the packages they need come along."""
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    known = {line.partition("[")[0].replace("-", "_") for line in lines} | {
        "tokenizers",
        "safetensors",
        "huggingface_hub",
        "grpo",
    }
    for path in (ROOT / "grpo").rglob("*.py"):
        # Extras, which only the files that are about them may import.
        allowed = known | ({"vllm"} if path.parent.name == "vllm" else set())
        allowed |= {"bitsandbytes"} if path.name == "adamw_8bit.py" else set()
        allowed |= {"ray"} if path.name == "ray.py" else set()
        allowed |= {"ray", "verl"} if path.parent.name == "plugins" else set()
        for name in imported(ast.parse(path.read_text())):
            assert name in allowed or name in sys.stdlib_module_names, f"{path.name}: {name}"


def imported(module: ast.Module) -> set[str]:
    nodes = [*ast.walk(module)]
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in named}
