"""Says before a benchmark starts what is not installed: one line with pip's command, and exit code 2."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import NoReturn

EXTRAS = Path(__file__).parents[1] / "pyproject.toml"
SMOLLM2 = "SmolLM2-135M-Instruct"
"""Name of the folder that benchmarks/real_model.py makes."""


def stop(message: str) -> NoReturn:
    """Ends the process with exit code 2, as for any bad input."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def need(*modules: str) -> None:
    """Stops if a package of an extra of pyproject.toml is missing. Modules and packages have the same names here."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        packages = " ".join(f"'{requirement(name)}'" for name in missing)
        stop(f"{', '.join(missing)} not installed; install with: {sys.executable} -m pip install {packages}")


def need_vllm() -> None:
    """Stops if this Python has no vLLM, which is no extra: it cannot be installed beside Prefect."""
    if importlib.util.find_spec("vllm") is None:
        stop(f"{sys.executable} has no vllm; `make vllm` installs it in build/vllm")


def need_smollm2(folder: Path) -> None:
    """Stops if SmolLM2 is neither in `folder` nor can be converted from its GGUF file."""
    if not (folder / SMOLLM2 / "config.json").is_file():
        need("gguf")


def requirement(package: str) -> str:
    """The package with its versions, as an extra of pyproject.toml asks for it."""
    extras = tomllib.loads(EXTRAS.read_text())["project"]["optional-dependencies"].values()
    return next(line for extra in extras for line in extra if re.fullmatch(f"{package}[^a-z_-].*", line))
