"""Whether a permanent Prefect server keeps runs is known from every place that Prefect reads its settings from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
URL = "http://127.0.0.1:4200/api"
ASK = "import sys; from flows.prefect_server import keeps_runs; print(keeps_runs(), 'prefect' in sys.modules)"
FILES = {
    "prefect.toml": f'[api]\nurl = "{URL}"\n',
    "pyproject.toml": f'[tool.prefect.api]\nurl = "{URL}"\n',
    ".env": f"PREFECT_API_URL={URL}\n",
    "home/profiles.toml": f'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "{URL}"\n',
}


def asked(folder: Path, **variables: str) -> list[str]:
    """What `keeps_runs` returns in a process that works in this folder, and whether it loaded Prefect."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    (folder / "home").mkdir(exist_ok=True)
    environment = {**kept, "PYTHONPATH": str(ROOT), "PREFECT_HOME": str(folder / "home"), **variables}
    command = [sys.executable, "-c", ASK]
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout.split()


def test_without_settings_prefect_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["prefect"]\n')
    assert asked(tmp_path) == ["False", "False"]


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / name).write_text(FILES[name])
    assert asked(tmp_path) == ["True", "True"]


def test_variables(tmp_path: Path) -> None:
    assert asked(tmp_path, PREFECT_API_URL=URL) == ["True", "True"]
    (tmp_path / "mine.toml").write_text(FILES["home/profiles.toml"])
    assert asked(tmp_path, PREFECT_PROFILES_PATH=str(tmp_path / "mine.toml")) == ["True", "True"]
