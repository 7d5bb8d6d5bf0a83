"""Settings of the whole test session."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# Matplotlib, which MLflow loads, caches fonts in the home folder; the tests leave nothing there.
if "MPLCONFIGDIR" not in os.environ:
    os.environ["MPLCONFIGDIR"] = tempfile.mkdtemp(prefix="r1flow-matplotlib-")
    atexit.register(shutil.rmtree, os.environ["MPLCONFIGDIR"], ignore_errors=True)

# Prefect waits 20 s for a temporary server of its own, which is short on a busy machine.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")

# A worker of pytest-xdist has one core to itself.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background jobs with SIGINT ignored, which children inherit: Ctrl-C tests would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests load a million objects that stay. Looking at them again and again is a fifth of the time of their collection.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


class OneFirstRun(LoadFileScheduling):
    """A process of pytest-xdist takes whole files, and one takes all files of `first_run`, so that it is made once."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope(super()._split_scope(nodeid))


@cache
def _scope(file: str) -> str:
    return "first_run" if "first_run" in (Path(__file__).parents[1] / file).read_text() else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneFirstRun | None:
    return OneFirstRun(config, log) if config.getoption("dist") == "loadfile" else None
