"""requirements.lock: the versions of constraints.txt, all that pyproject.toml asks for, and `make install` uses it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from functools import cache
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OF_CUDA = ("nvidia-", "cuda-", "triton")  # what torch requires in its builds with CUDA
RENEW = "run `make lock`, and name in constraints.txt what it adds"


def entries(text: str) -> list[list[str]]:
    """Requirement and options of each entry: lines that end in a backslash go on."""
    whole = re.sub(r" *\\\n *", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [line.split(" --hash=") for line in whole.splitlines()]


@cache
def locked() -> dict[str, str]:
    """Versions by name."""
    return pinned(entry[0] for entry in entries((ROOT / "requirements.lock").read_text()))


def pinned(lines) -> dict[str, str]:
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in requirements}


def test_lock_and_constraints_name_the_same_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = pinned(line for line in lines if not line.startswith("#"))
    assert constraints == {**locked(), "torch": constraints["torch"]}, RENEW


def test_every_entry_has_hashes() -> None:
    for requirement, *hashes in entries((ROOT / "requirements.lock").read_text()):
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", value) for value in hashes), requirement


def asked() -> list[str]:
    """What the build, the project and its extra `dev` ask for, and torch, whose own entry is not in the lock."""
    project = PROJECT["project"]
    ours = [*PROJECT["build-system"]["requires"], *project["dependencies"], *project["optional-dependencies"]["dev"]]
    torchs = [r for r in requires("torch") or [] if "extra ==" not in r and not r.startswith(OF_CUDA)]
    return [r for r in ours if Requirement(r).name != "torch"] + torchs


@pytest.mark.parametrize("requirement", asked())
def test_the_lock_has_what_is_asked_for(requirement: str) -> None:
    wanted = Requirement(requirement)
    name = canonicalize_name(wanted.name)
    assert name in locked() and locked()[name] in wanted.specifier, RENEW


def test_make_installs_nothing_else_but_torch_and_the_project(tmp_path: Path) -> None:
    made = subprocess.run(
        ["make", "--dry-run", f"VENV={tmp_path}", "install"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    commands = [line.partition("--no-cache-dir ")[2] for line in made.stdout.splitlines() if "pip install" in line]
    assert commands == [
        "--require-hashes --no-deps --requirement /dev/stdin",
        "--require-hashes --no-deps --no-build-isolation --requirement requirements.lock",
        "\"$(grep '^torch==' constraints.txt)\"",
        "--no-deps --no-build-isolation --editable .",
    ]
