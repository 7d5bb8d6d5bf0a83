"""The image's Dockerfile beside what it is built from. Building it needs Docker and is left to who has it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deployments" / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
READ = {"constraints.txt", "requirements.lock", "pyproject.toml", "README.md", "LICENSE"}


def test_the_image_has_every_package_and_all_that_the_build_reads() -> None:
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", TEXT, re.MULTILINE) for name in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    build = PROJECT["tool"]["setuptools"]
    packages = {name.rstrip("*") for name in build["packages"]["find"]["include"]}
    modules = {f"{name}.py" for name in build["py-modules"]}
    assert packages | modules | READ == copied
    ignored, *let_in = (ROOT / "deployments" / "Dockerfile.dockerignore").read_text().split()
    assert ignored == "*" and {name.removeprefix("!") for name in let_in if name.startswith("!")} == copied


def test_the_image_takes_its_packages_from_the_lock() -> None:
    assert not re.search(r"==\s*\d", TEXT)
    locked = "--require-hashes --no-deps --no-build-isolation --requirement requirements.lock"
    assert (
        TEXT.index(locked) < TEXT.index("grep '^torch==' constraints.txt") < TEXT.index("--constraint constraints.txt")
    )
    [extras] = re.findall(r"EXTRAS=(\S+)", TEXT)
    optional = PROJECT["project"]["optional-dependencies"]
    assert all(set(optional[extra]) <= set(optional["dev"]) for extra in extras.split(","))  # dev is what the lock has


def test_pools_run_the_image_of_this_version() -> None:
    image = f"r1flow:{PROJECT['project']['version']}"
    assert f"--tag {image}" in TEXT
    for kind in ("docker", "kubernetes"):
        pools = yaml.safe_load((ROOT / "deployments" / "pools" / f"{kind}.yaml").read_text())
        assert pools["template"]["variables"]["properties"]["image"]["default"] == image
        mounts = re.findall(r"/data/\w+", str(pools["template"]["job_configuration"]))
        assert set(mounts) == {"/data/r1flow", "/data/cache"} and "R1FLOW_HOME=/data/r1flow" in TEXT
