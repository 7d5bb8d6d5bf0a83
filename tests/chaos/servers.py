"""Servers of Prefect and MLflow that the suite itself starts, stops and kills."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from flows.prefect_server import free_port, is_open
from tests.support.r1 import ROOT


class Server:
    """Prefect's or MLflow's server with its data in a home, on a port of its own."""

    def __init__(self, name: str, home: Path, log: Path):
        self.port, self.home, self.name, self.log = free_port(), home, name, log
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "R1FLOW_"))}
        own = {"PREFECT_HOME": str(home / "prefect"), "PREFECT_UI_ENABLED": "0", "PYTHONPATH": str(ROOT)}
        self.environment = {**kept, **own, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        self.start()

    @property
    def url(self) -> str:
        """As clients are to be told."""
        return f"http://127.0.0.1:{self.port}" + ("/api" if self.name == "prefect" else "")

    def start(self) -> None:
        """Start it and wait until it answers."""
        if self.name == "prefect":
            place = [
                "uvicorn",
                "--factory",
                "prefect.server.api.server:create_app",
                "--log-level",
                "error",
                "--lifespan",
                "on",
            ]
        else:
            place = ["mlflow", "server", "--backend-store-uri", f"sqlite:///{self.home}/mlflow.db", "--workers", "1"]
            place += ["--serve-artifacts", "--artifacts-destination", str(self.home / "mlartifacts")]
        command = [sys.executable, "-m", *place, "--host", "127.0.0.1", "--port", str(self.port)]
        for folder in (self.log.parent, self.home / "prefect"):
            folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if is_open(self.port) and httpx.get(f"{self.url}/health", timeout=60).is_success:
                    return
            time.sleep(0.1)
        raise AssertionError(f"the server of {self.name} did not start; see {self.log}")

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)
        self.process.wait()
