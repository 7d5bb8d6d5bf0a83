"""Both user interfaces on loopback: Prefect's (flows) and MLflow's (runs), until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from flows.home import home
from flows.server import HOST, START_S, is_open
from grpo.errors import InputError
from tasks.tracking import default_uri


def serve(prefect_port: int, mlflow_port: int) -> int:
    """Start both servers, say where they are, stop both when this process is told to stop or one of them ends."""
    for name, port in (("--prefect-port", prefect_port), ("--mlflow-port", mlflow_port)):
        if is_open(port):
            raise InputError(f"port {port} is in use on {HOST}; choose another with {name}")
    place = home()
    place.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    prefect = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(prefect_port)]
    mlflow = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(mlflow_port), "--workers", "1"]
    mlflow += ["--backend-store-uri", default_uri(place), "--artifacts-destination", str(place / "mlartifacts")]
    api = f"http://{HOST}:{prefect_port}/api"  # the pages ask port 4200 unless they are told otherwise
    url_file = place / "prefect-url"
    with (
        _running("prefect", prefect, {"PREFECT_UI_API_URL": api}),
        _running("mlflow", mlflow, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}),
    ):
        _wait(prefect_port, "Prefect")
        _wait(mlflow_port, "MLflow")
        url_file.write_text(f"{api}\n")
        print(f"Prefect: http://{HOST}:{prefect_port}\nMLflow:  http://{HOST}:{mlflow_port}", flush=True)
        print("`r1 run` uses this server while it is up. Ctrl-C stops both.", file=sys.stderr)
        try:
            while is_open(prefect_port) and is_open(mlflow_port):
                time.sleep(2)
        except (KeyboardInterrupt, SystemExit):
            return 0
        finally:
            url_file.unlink(missing_ok=True)
    print(f"error: a server ended; see {place / 'logs'}", file=sys.stderr)
    return 1


@contextlib.contextmanager
def _running(name: str, command: list[str], settings: dict[str, str]) -> Iterator[None]:
    """A server in a process group of its own: stopping it stops the processes that it started."""
    log = home() / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **settings},
            start_new_session=True,
        )
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)


def _wait(port: int, name: str) -> None:
    deadline = time.monotonic() + START_S
    while not is_open(port):
        if time.monotonic() > deadline:
            raise InputError(f"{name} did not start on port {port} within {START_S:g} s; see {home() / 'logs'}")
        time.sleep(0.5)
