"""The home folder is its owner's alone, or its group's; one that cannot be written ends in one line."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from flows.home import POSTGRES, prepare_environment, store
from grpo.errors import InputError
from tests.support.r1 import R1


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith(("PREFECT_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    for name in ("PREFECT_HOME", "PREFECT_API_URL", "PREFECT_LOGGING_LEVEL", "PREFECT_LOGGING_INTERNAL_LEVEL"):
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("before", [None, 0o755, 0o777, 0o700])
def test_a_home_is_its_owners_alone(home: Path, before: int | None) -> None:
    if before is not None:
        (home / "prefect").mkdir(parents=True)
        for path in (home / "mlflow.db", home / "prefect" / "prefect.db-wal"):
            path.touch()
            path.chmod(0o644)
        home.chmod(before)
    prepare_environment()
    assert mode(home) == 0o700
    assert {mode(path) for path in home.rglob("*.db*")} <= {0o600}


def test_a_groups_home_stays_the_groups(home: Path) -> None:
    home.mkdir()
    home.chmod(0o2775)
    (home / "mlflow.db").touch()
    (home / "mlflow.db").chmod(0o664)
    prepare_environment()
    assert (mode(home), mode(home / "mlflow.db")) == (0o2770, 0o660)


def test_a_folder_that_is_everybodys_stays_as_it_is(home: Path) -> None:
    home.mkdir()
    home.chmod(0o1777)
    prepare_environment()
    assert mode(home) == 0o1777


@pytest.mark.skipif(os.geteuid() != 0, reason="a cluster of another user's is made by root alone")
def test_the_user_of_a_cluster_may_pass(home: Path) -> None:
    (home / POSTGRES).mkdir(parents=True)
    home.chmod(0o755)
    prepare_environment()
    assert mode(home) == 0o701


def test_a_path_through_a_file_is_one_line(home: Path) -> None:
    home.write_text("a file")
    with pytest.raises(InputError, match="set R1FLOW_HOME to a folder that can be written"):
        prepare_environment()


def test_a_home_of_nobody_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        R1(tmp_path).command("stages"),
        capture_output=True,
        text=True,
        env=R1(tmp_path).environment() | {"R1FLOW_HOME": "~nosuch/x"},
    )
    line = "error: ~nosuch/x: ~nosuch is no user's home folder; write the whole path\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_a_home_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    command = R1(home).command("plan", "tiny")
    if os.geteuid() == 0:  # may write wherever the file system itself lets it
        command = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o ro none "{home}" && exec "$@"', "-", *command]
    else:
        home.chmod(0o500)
    done = subprocess.run(command, capture_output=True, text=True, env=R1(home).environment(), timeout=300)
    if "unshare" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {home}: ") and "set R1FLOW_HOME to a folder that can be written" in line


@pytest.mark.system
def test_a_run_makes_databases_that_nobody_else_reads(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        done = R1(tmp_path / "home")("run", "tiny", "--only", "problems")
    finally:
        os.umask(old)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {path.name: mode(path) for path in (tmp_path / "home").rglob("*.db*")}
    assert {"mlflow.db", "prefect.db"} <= found.keys() and {*found.values()} == {0o600}
    assert mode(tmp_path / "home") == 0o700


def test_a_folder_of_the_home_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from flows.cli import main

    def run(args: object) -> int:
        raise OSError(28, "No space left on device", str(tmp_path / "file"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("R1FLOW_HOME", str(tmp_path))
        patch.setattr(main, "prepare_environment", lambda: None)
        patch.setitem(main.COMMANDS, "stages", run)
        assert main.main(["stages"]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'file'}: No space left on device\n"


def test_an_output_that_cannot_be_written_is_not_taken_for_the_home(tmp_path: Path) -> None:
    r1 = R1(tmp_path)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            r1.command("recipes"), env=r1.environment(), stdout=full, stderr=subprocess.PIPE, text=True
        )
    line = "error: the output, or a file that was being written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_artifacts_are_where_r1flow_store_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    monkeypatch.delenv("R1FLOW_STORE", raising=False)
    assert store().backend.place == str(tmp_path)
    monkeypatch.setenv("R1FLOW_STORE", "s3://bucket/team/")
    there = store()
    assert there.backend.place == "s3://bucket/team" and there.root == tmp_path
    assert store() is there  # one connection, and one holder of the copies in use
    monkeypatch.setenv("R1FLOW_CACHE_GB", "none")
    with pytest.raises(InputError, match="R1FLOW_CACHE_GB=none: give a number of gigabytes above 0"):
        store()
