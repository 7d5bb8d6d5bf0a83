"""A real vLLM server in an environment of its own (`make vllm`), for the length of a block."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess

from tests.support.job_runner import ROOT
from tests.support.vllm_models import PYTHON


@contextlib.contextmanager
def served(model, log, *options):
    """The address of a server that is ended, with all its processes, at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", "1G")
    command = [PYTHON, "-m", "grpo.generation.vllm.server", model, "--port", port, *common, *options]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
    with log.open("w") as output:
        server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}", server.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
