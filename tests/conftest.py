"""Settings of the whole test session."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile

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
