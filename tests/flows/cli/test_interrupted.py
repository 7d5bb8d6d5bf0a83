"""Ctrl-C while the command still imports: one line and exit code 130, no traceback."""

from __future__ import annotations

import subprocess
from pathlib import Path

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
