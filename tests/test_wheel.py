"""An installation from a wheel, outside of the repository: it has every file it needs, runs, deploys, and is not
confused by folders of the user's own that are called as our packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.support.prefect_server import Server

ROOT = Path(__file__).parents[1]
PACKAGES = ("deployments", "flows", "tasks", "grpo")
NOT_INSTALLED = {
    "deployments/Dockerfile",
    "deployments/Dockerfile.dockerignore",
    "deployments/Dockerfile.verl",
    "grpo/requirements.txt",
    "grpo/trainers/verl/requirements.txt",
}
SMALL = [f"problems.sources.{number}.count=60" for number in range(2)]


class Installed(NamedTuple):
    wheel: Path
    bin: Path
    home: Path

    def __call__(self, folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "PYTHON"))}
        environment = {**kept, "R1FLOW_HOME": str(self.home), **variables}
        program = [str(self.bin / command[0]), *command[1:]]
        return subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A virtual environment with the wheel; the packages it depends on are those of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        if name.startswith(tuple(f"{package}/" for package in PACKAGES)) or "/" not in name:
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, "wheel", *options, str(folder / "source")], check=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(wheel, python.parent, folder / "home")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with a package flows, and files called as ours, of somebody else."""
    for name in ("flows", "tasks", "grpo"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('a module of the user')\n")
    return tmp_path


@pytest.mark.system
def test_the_wheel_has_every_file_of_the_packages(installed: Installed) -> None:
    ours = {name for name in tracked() if name.startswith(tuple(f"{package}/" for package in PACKAGES))}
    expected = {name for name in ours - NOT_INSTALLED if not name.endswith(".md")} | {"r1flow.py"}
    packed = {name for name in zipfile.ZipFile(installed.wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected
    assert {"flows/recipes/tiny.toml", "deployments/prefect.yaml", "grpo/py.typed"} <= packed


@pytest.mark.system
def test_it_runs_and_deploys_beside_folders_called_as_ours(installed: Installed, elsewhere: Path) -> None:
    sets = [part for value in SMALL for part in ("--set", value)]
    ran = installed(elsewhere, "r1", "run", "tiny", "--only", "problems", *sets)
    assert ran.returncode == 0, ran.stderr
    listed = installed(elsewhere, "r1", "stages").stdout
    assert "problems" in listed
    (elsewhere / "server").mkdir()
    server = Server(elsewhere / "server")
    server.start()
    try:
        deployed = installed(elsewhere, "r1", "deploy", "--yes", PREFECT_API_URL=server.url)
        assert deployed.returncode == 0, deployed.stderr
        deployments = server.ask("POST", "/deployments/filter")
    finally:
        server.stop()
    expected = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"]
    assert {found["name"] for found in deployments} == {wanted["name"] for wanted in expected}
    code = "import sys; from prefect.flows import load_flow_from_entrypoint as load; [load(e) for e in sys.argv[1:]]"
    entries = sorted({found["entrypoint"] for found in deployments})
    loaded = installed(installed.home, "python", "-c", code, *entries)
    assert entries and loaded.returncode == 0, loaded.stderr


@pytest.mark.system
@pytest.mark.parametrize("command", [("r1",), ("python", "-P", "-m", "r1flow")], ids=["r1", "module"])
def test_a_folder_that_hides_ours_is_named_in_one_line(
    installed: Installed, elsewhere: Path, command: tuple[str, ...]
) -> None:
    shutil.rmtree(elsewhere / "grpo")
    shutil.rmtree(elsewhere / "tasks")
    ended = installed(elsewhere, *command, "plan", "tiny", PYTHONPATH=str(elsewhere))
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: {elsewhere / 'flows'} hides the package 'flows' of r1flow") and "rename it" in line
