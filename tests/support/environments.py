"""Environments of Python beside the one that the tests run in."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path


def script_environment(**variables: str) -> dict[str, str]:
    """The variables for a script that imports what is beside it. PYTHONSAFEPATH would keep it from that, and is set in
    this process as soon as another test has called `prepare_environment`."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | variables


def bare_environment(folder: Path) -> str:
    """The Python of an environment without packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


def other_environment(folder: Path) -> str:
    """The Python of an environment with the packages of this one, but without an editable r1flow: files with imports,
    such as its own, count only in the environment that they are in."""
    python = bare_environment(folder)
    [site] = (folder / "lib").glob("python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python
