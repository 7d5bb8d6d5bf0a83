"""Signals at awkward moments: while the command imports, and in a destructor."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.r1 import R1

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
