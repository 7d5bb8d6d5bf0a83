"""Where a run comes from, asked of a real git repository, this machine and its libraries."""

from __future__ import annotations

import getpass
import subprocess
from importlib.metadata import version
from pathlib import Path

from tasks.estimate.origin import _gpus, code_version, origin


def test_the_version_is_the_commit_of_the_code(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=Ada", "-c", "user.email=ada@example.com", "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert code_version(tmp_path / "site-packages") == version("r1flow")
    git("init")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    git("tag", "-a", "v1", "-m", "a tag is no version of its own here")
    commit = git("rev-parse", "HEAD")[:12]
    assert code_version(tmp_path) == commit
    (tmp_path / "code.py").write_text("2")
    code_version.cache_clear()
    assert code_version(tmp_path) == f"{commit}-dirty"


def test_it_names_user_machine_and_libraries() -> None:
    known = origin()
    assert known["user"] == getpass.getuser() and known["machine"]
    assert {name: known[name] for name in ("torch", "transformers")} == {
        name: version(name) for name in ("torch", "transformers")
    }
    assert known["version"] == version("r1flow") and known.get("dirty") in (None, "true", "false")


def test_gpus_are_those_that_their_driver_lists(tmp_path: Path) -> None:
    for number, model in enumerate(["NVIDIA H100 80GB HBM3"] * 2 + ["NVIDIA A10"]):
        place = tmp_path / f"0000:0{number}:00.0"
        place.mkdir()
        (place / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 117\n")
    assert _gpus(tmp_path) == "2 x NVIDIA H100 80GB HBM3, NVIDIA A10"
    assert _gpus(tmp_path / "absent") is None
