"""The Python that runs trainers: this one, or that of another environment (R1FLOW_TRAINER_PYTHON).

vLLM and Prefect need different versions of the same packages, so vLLM is installed in an environment of its own, with
what grpo/requirements.txt names. Trainers run there whole: training, sampling, rewards.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from functools import cache

from grpo.errors import InputError
from grpo.other_environments import ALONE, FOUND_IN

VARIABLE = "R1FLOW_TRAINER_PYTHON"
MODULES = ("torch", "transformers", "accelerate", "peft", "pyarrow", "pydantic", "numba", "regex", "rich", "sympy")
"""Modules that every trainer needs; grpo/requirements.txt names the packages."""
_ASK = """
import importlib.metadata, importlib.util, json, sys
modules, packages = json.loads(sys.argv[1])
versions = {}
for name in packages:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
missing = [name for name in modules if importlib.util.find_spec(name) is None]
print(json.dumps([list(sys.version_info[:2]), missing, versions]))
"""


def trainer_python() -> str:
    """Path of the interpreter. Raises InputError if R1FLOW_TRAINER_PYTHON names one that cannot run trainers."""
    given = os.environ.get(VARIABLE)
    if not given:
        return sys.executable
    version, missing, _ = _answer(given, MODULES, ())
    if version < (3, 11):
        raise InputError(f"{VARIABLE}={given} is Python {version[0]}.{version[1]}; take 3.11 or newer")
    if missing:
        raise InputError(
            f"{VARIABLE}={given} lacks {', '.join(missing)}; install there what grpo/requirements.txt names"
        )
    return given


def library_path() -> str:
    """The folder on the PYTHONPATH of trainers in which they find `grpo`."""
    return FOUND_IN if trainer_python() == sys.executable else ALONE


def has_module(name: str) -> bool:
    """Whether trainers can import a module."""
    if trainer_python() == sys.executable:
        return importlib.util.find_spec(name) is not None
    return not _answer(trainer_python(), (name,), ())[1]


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of those packages that trainers have."""
    if trainer_python() == sys.executable:
        return {name: importlib.metadata.version(name) for name in packages if _is_installed(name)}
    return _answer(trainer_python(), (), packages)[2]


def _is_installed(package: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=package))


@cache
def _answer(
    python: str, modules: tuple[str, ...], packages: tuple[str, ...]
) -> tuple[tuple[int, int], list[str], dict[str, str]]:
    """Version of an interpreter, the modules that it lacks, and the versions of the packages that it has."""
    command = [python, "-I", "-c", _ASK, json.dumps([modules, packages])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{VARIABLE}={python} cannot be run ({error}); name the python of an environment") from None
    try:
        (major, minor), missing, found = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        raise InputError(f"{VARIABLE}={python} is no Python ({said}); name the python of an environment") from None
    return (major, minor), missing, found
