"""Who may import whom: deployments -> flows -> tasks -> grpo, and what each room never knows."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("deployments", "flows", "tasks", "grpo")
FORBIDDEN = {
    "grpo": {"prefect", "mlflow", "pandas", "tasks", "flows", "deployments"},
    "tasks": {"flows", "deployments"},
    "flows": {"torch", "transformers", "mlflow", "deployments"},
}


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_imports_only_what_lies_to_its_right(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        assert not imported(path) & FORBIDDEN[room], path


def test_what_knows_mlflow_is_called_after_it() -> None:
    knowing = [p.relative_to(ROOT).as_posix() for p in ROOT.glob("tasks/**/*.py") if "mlflow" in imported(p)]
    assert sorted(knowing) == ["tasks/tracking/client.py", "tasks/tracking/database.py", "tasks/tracking/outbox.py"]


def test_the_command_does_not_load_torch() -> None:
    code = (
        "import sys, flows.run.executor, flows.run.plan, flows.cli.main; "
        "print('torch' in sys.modules, 'mlflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["False", "False"]
