"""Signals at awkward moments: while the command imports, in a destructor, and two of them while a trainer runs."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.r1 import R1, SMALLER

SLOW_IMPORT = """
import builtins, os, signal
real = builtins.__import__
def slow(name, *rest):
    if name == "argparse" or name.startswith("flows.home"):  # the first things that the command imports
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest)
"""


def test_ctrl_c_while_importing(tmp_path: Path) -> None:
    r1 = R1(tmp_path)
    start = "import sys\nfrom flows.cli.__main__ import main\nbuiltins.__import__ = slow\nsys.exit(main())"
    done = subprocess.run(
        [r1.command()[0], "-c", SLOW_IMPORT + start, "stages"],
        capture_output=True,
        text=True,
        env=r1.environment(),
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (130, "stopped\n"), done.stderr


IN_A_DESTRUCTOR = """
import os, signal, sys, time
from prefect.utilities.engine import capture_sigterm
import flows.cli.main
from flows.cli.__main__ import main

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])
        time.sleep(0.01)  # here the handler raises, and Python drops the exception

def run():
    with capture_sigterm():
        Dropped()
        time.sleep(30)

flows.cli.main.main = run
sys.exit(main())
"""


@pytest.mark.parametrize(("name", "code", "said"), [("SIGINT", 130, "stopped\n"), ("SIGTERM", -signal.SIGTERM, "")])
def test_signal_in_a_destructor_is_not_lost(tmp_path: Path, name: str, code: int, said: str) -> None:
    r1 = R1(tmp_path)
    done = subprocess.run(
        [r1.command()[0], "-c", IN_A_DESTRUCTOR, name],
        capture_output=True,
        text=True,
        env=r1.environment(),
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (code, said), done.stderr


@pytest.mark.system
def test_sigterm_and_then_ctrl_c_end_a_run_and_its_trainer(tmp_path: Path) -> None:
    """The second signal came while the first was being dealt with; the command then waited for its own time limits, and
    two runs stayed RUNNING in MLflow."""
    r1 = R1(tmp_path)
    sets = [part for value in [*SMALLER, "base.pretrain.steps=100000"] for part in ("--set", value)]
    command = r1.command("run", "tiny", "--only", "base", *sets)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    began = time.monotonic()
    process = subprocess.Popen(command, env=r1.environment(), start_new_session=True, **pipes)
    try:
        while not any(path.read_text() for path in tmp_path.glob("work/base-*/trainer/metrics.jsonl")):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.1)
        started_s = time.monotonic() - began
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        # It was 67 s, by the time limits of what it waited for. A machine that starts slowly also ends slowly.
        _, errors = process.communicate(timeout=max(60, 2 * started_s))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode in (130, 143, -signal.SIGTERM) and "Traceback" not in errors, errors
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        ended = [status for (status,) in database.execute("select status from runs")]
    assert ended and "RUNNING" not in ended
