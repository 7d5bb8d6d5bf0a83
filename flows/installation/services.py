"""Prefect and MLflow servers on loopback: their commands, addresses and health."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from flows.home import STATE, read_state
from flows.installation.credentials import prefect_password
from flows.installation.prefect_app import SIGN_IN
from flows.installation.supervisor import PYTHON, Service, tail
from flows.prefect_server import HOST, is_open, private_database, serving
from grpo.errors import InputError
from tasks.store.whole_file import write_whole
from tasks.tracking.connection import default_uri
from tasks.tracking.moved_database import follow_move
from tasks.trainer.processes import process_name

START_S = 600.0
"""Timeout in seconds for starting a server on a busy machine. A server that fails ends sooner."""
OTHER_SCHEMA = {
    "mlflow": ("out-of-date database schema", "copy it, then `mlflow db upgrade` with its address"),
    # The server upgrades an older database by itself.
    "prefect": ("Can't locate revision", "install the version that wrote it, or a newer one"),
}
"""Server -> log message about a database that it cannot use, and the remedy."""


@dataclass(frozen=True)
class Databases:
    """Databases of the servers."""

    prefect: str | None  # None: SQLite in Prefect's home
    mlflow: str


def sqlite(home: Path) -> Databases:
    """Databases as files in the home folder. MLflow's is created here, because a server that is killed while creating
    it would leave it incomplete. If the home was moved, the paths in it are updated: the server would not do that."""
    uri = default_uri(home)
    path = uri.removeprefix("sqlite:///")
    if Path(path).exists():
        follow_move(Path(path))
    else:
        subprocess.run([*PYTHON, "tasks.tracking.database", path], check=True)
    return Databases(None, uri)


def prefect_url(port: int) -> str:
    """URL of Prefect's API on this machine."""
    return f"http://{HOST}:{port}/api"


def mlflow_url(port: int) -> str:
    """URL of the MLflow server on this machine."""
    return f"http://{HOST}:{port}"


def sign_in_url(home: Path, port: int) -> str:
    """Link that opens Prefect's pages and signs the browser in."""
    return f"http://{HOST}:{port}{SIGN_IN}#{quote(prefect_password(home))}"


def prefect_server(home: Path, port: int, databases: Databases) -> Service:
    """The Prefect server as a service. It requires the home's password, and pages of other origins cannot read it."""
    command = tuple(serving("flows.installation.prefect_app:create_app", str(port)))
    settings = {
        "R1FLOW_HOME": str(home),  # to show its reports
        "PREFECT_UI_API_URL": prefect_url(port),  # by default, the pages use port 4200
        "PREFECT_API_URL": prefect_url(port),
        "PREFECT_API_AUTH_STRING": prefect_password(home),
        "PREFECT_SERVER_API_AUTH_STRING": prefect_password(home),
        # In memory, they would be lost with a restart of the server, and the slots of GPUs taken for ever.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{HOST}:{port},http://localhost:{port}",
    }
    if not databases.prefect:
        private_database()
    else:
        settings["PREFECT_API_DATABASE_CONNECTION_URL"] = databases.prefect
        # Seconds. On a busy machine, connecting takes longer than Prefect's default of 5, and the server would return
        # an error.
        settings |= {"PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60", "PREFECT_SERVER_DATABASE_TIMEOUT": "60"}
    return Service("prefect", command, settings)


def mlflow_server(home: Path, port: int, databases: Databases) -> Service:
    """The MLflow server as a service. Artifacts are in the home folder, where clients find them with or without the
    server."""
    command = [*PYTHON, "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--no-serve-artifacts", "--default-artifact-root", (home / "mlartifacts").as_uri()]
    # Not on the command line, where others could read a password.
    settings = {"MLFLOW_BACKEND_STORE_URI": databases.mlflow, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return Service("mlflow", command, settings)


def check_ports(ports: Mapping[str, int]) -> None:
    """Raises InputError if a port is invalid, given twice, or in use. `ports`: option -> port."""
    for option, port in ports.items():
        if not 1 <= port <= 65535:
            raise InputError(f"{option} {port}: give a port from 1 to 65535")
        if same := [other for other, its in ports.items() if other != option and its == port]:
            raise InputError(f"{option} and {same[0]} are both {port}; give two ports")
        if is_open(port):
            raise InputError(f"port {port} is in use on {HOST}; choose another with {option}")


def wait_for(service: Service, port: int, logs: Path, stopped: Callable[[], bool] = lambda: False) -> None:
    """Waits until something answers on the port.

    Raises:
        InputError: the service ended, or does not answer in time; the message gives the reason if the log shows one.
    """
    deadline = time.monotonic() + START_S
    log = logs / f"{service.name}.log"
    while not is_open(port):
        if stopped():
            return
        if not service.is_alive():
            text = log.read_text(errors="replace")[-20_000:] if log.exists() else ""
            sign, remedy = OTHER_SCHEMA.get(service.name, ("", ""))
            if sign and sign in text:
                raise InputError(f"{service.name}: its database has the schema of another version; {remedy}; see {log}")
            raise InputError(f"{service.name} did not start: {tail(log)}; see {log}")
        if time.monotonic() > deadline:
            raise InputError(f"{service.name} did not answer on port {port} within {START_S:g} s; see {log}")
        time.sleep(0.3)


def living_supervisor(home: Path) -> int | None:
    """Process id of what supervises this home's servers, `r1 up` or `r1 ui`, if it is alive."""
    name = read_state(home).get("supervisor")
    pid = int(str(name).split()[0]) if name else None
    return pid if pid is not None and process_name(pid) == name else None


def write_state(home: Path, state: Mapping[str, object]) -> None:
    """Atomically replaces the state file of a running installation."""
    write_whole(home / STATE, json.dumps(state, indent=2))
