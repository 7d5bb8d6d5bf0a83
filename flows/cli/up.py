"""`r1 up` and `r1 down`: an installation on this machine that runs in the background.

It consists of Prefect and MLflow servers on loopback, the deployments, a worker for each work pool (for the pool of
stages that train or sample, one per GPU), and a sweeper of orphaned flow runs. A small supervisor keeps all of them
alive. Its process id and the addresses of the servers are in `up.json` in the home folder.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flows.home import POSTGRES, STATE, home, read_state
from flows.installation import services
from flows.installation.credentials import prefect_password
from flows.installation.services import Databases, living_supervisor
from flows.installation.supervisor import GRACE_S, PYTHON, Service, Supervisor, tail
from grpo.errors import InputError
from tasks.trainer.gpus import gpus
from tasks.trainer.processes import process_name

MARK = "R1FLOW_INSTALLATION"
"""Environment variable of all processes of an installation and their children. Its value is the home folder."""
LOCK = "up.lock"
"""File in the home folder, locked by `r1 up` from before it looks for an installation, then by the supervisor until it
ends: of two commands at the same moment, one starts an installation."""
LIMITS = {"r1-cpu": 16, "r1-tasks": 2}
"""Maximum concurrent flow runs per pool: recipes only wait, and stages without a GPU share the CPU. In r1-gpu, one per
worker."""
START_S, STOP_S = 1800.0, 180.0
POLL_WORK_S = 3


def add(commands: Any) -> None:
    """Adds both commands to the parser."""
    up = commands.add_parser("up", help="a whole installation on this machine: servers, deployments, workers")
    up.add_argument("--postgres", action="store_true", help="keep records in Postgres instead of SQLite")
    up.add_argument("--workers", type=int, metavar="N", help="stages at once (default: one per GPU, or one)")
    up.add_argument("--prefect-port", type=int, default=4200)
    up.add_argument("--mlflow-port", type=int, default=5000)
    up.add_argument("--postgres-port", type=int, default=5433)
    commands.add_parser("down", help="stop the installation that `r1 up` started; nothing is left running")


def run(args: argparse.Namespace) -> int:
    """Starts the installation, or reports that it is running."""
    place = home()
    with (place / LOCK).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _say_up(place)
        return _say_up(place) if living_supervisor(place) else _prepare(place, args, lock.fileno())


def _prepare(place: Path, args: argparse.Namespace, lock: int) -> int:
    if args.workers is not None and args.workers < 1:
        raise InputError(f"--workers {args.workers}: give 1 or more")
    _end_rest(place)
    (place / STATE).unlink(missing_ok=True)
    ports = {"--prefect-port": args.prefect_port, "--mlflow-port": args.mlflow_port}
    if args.postgres:
        from flows.installation.postgres import Cluster, check

        check(Cluster(place / POSTGRES, args.postgres_port))
        ports["--postgres-port"] = args.postgres_port
    services.check_ports(ports)
    return _start(place, args, lock)


def _start(place: Path, args: argparse.Namespace, lock: int) -> int:
    workers = args.workers or max(1, len(gpus()))
    ports = [args.prefect_port, args.mlflow_port, args.postgres_port if args.postgres else 0]
    logs = place / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "up.log").open("ab") as output:
        process = subprocess.Popen(
            [*PYTHON, "flows.cli.up", *map(str, ports), str(workers)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, MARK: str(place), "R1FLOW_HOME": str(place)},
            cwd="/",
            start_new_session=True,
            pass_fds=[lock],  # it keeps the lock when this command has ended
        )
    print("starting the servers, the deployments and the workers", file=sys.stderr)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        state = read_state(place)
        if state.get("ready"):
            return _say_where(place)
        if process.poll() is not None:
            (place / STATE).unlink(missing_ok=True)
            raise InputError(str(state.get("error") or f"it ended: {tail(logs / 'up.log')}; see {logs / 'up.log'}"))
        time.sleep(0.3)
    _stop(place)
    raise InputError(f"the installation was not up within {START_S:g} s; see {logs}")


def _say_up(place: Path) -> int:
    print("it is up already", file=sys.stderr)
    return _say_where(place)


def _say_where(place: Path) -> int:
    state = read_state(place)
    if not state.get("ready"):
        raise InputError(
            "it is still starting, or it is `r1 ui`, which has no workers; wait, or stop it with `r1 down`"
        )
    print(f"Prefect: {services.sign_in_url(place, urlsplit(str(state['prefect'])).port or 80)}")
    print(f"MLflow:  {state['tracking']}")
    print("`r1 run` uses these servers; `r1 run --dispatch` the workers too. `r1 down` stops all.", file=sys.stderr)
    return 0


def down(args: argparse.Namespace) -> int:
    """Stops the installation. Recipes in progress continue at the next `r1 up`."""
    place = home()
    was_up = living_supervisor(place) is not None
    _stop(place)
    print("stopped" if was_up else "nothing was running", file=sys.stderr)
    return 0


def _stop(place: Path) -> None:
    if pid := living_supervisor(place):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while living_supervisor(place) and time.monotonic() < deadline:
            time.sleep(0.2)
    _end_rest(place)
    (place / STATE).unlink(missing_ok=True)


def _end_rest(place: Path) -> None:
    """Ends the remaining processes of an installation whose supervisor was killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_S
        told: set[int] = set()
        while (left := _marked(place)) and time.monotonic() < deadline:
            for pid in left - told:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            told |= left
            time.sleep(0.1)


def _marked(place: Path) -> set[int]:
    """Ids of processes with the installation's mark in their environment."""
    mark = f"{MARK}={place}".encode()
    pids = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0") and process_name(int(folder.name)):
                pids.add(int(folder.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return pids - {os.getpid()}


def workers(number: int, settings: dict[str, str]) -> list[Service]:
    """A worker for each pool, and `number` workers for stages that train or sample, each with its own GPU if there are
    any."""
    devices = gpus()
    start = [*PYTHON, "prefect", "worker", "start", "--type", "process", "--install-policy", "never"]
    places: list[tuple[str, str, dict[str, str]]] = [("r1-cpu", "r1-cpu", {}), ("r1-tasks", "r1-tasks", {})]
    for index in range(number):
        visible = {"CUDA_VISIBLE_DEVICES": devices[index % len(devices)]} if devices else {}
        places.append((f"r1-gpu-{index}", "r1-gpu", visible))
    return [
        Service(
            f"worker-{name}",
            [*start, "--pool", pool, "--name", name, "--limit", str(LIMITS.get(pool, 1))],
            {**settings, **visible},
        )
        for name, pool, visible in places
    ]


def supervise(prefect_port: int, mlflow_port: int, postgres_port: int, number: int) -> int:
    """Runs the installation's supervisor."""
    place = home()
    logs = place / "logs"
    prefect, mlflow = services.prefect_url(prefect_port), services.mlflow_url(mlflow_port)
    state: dict[str, object] = {"supervisor": process_name(os.getpid()), "prefect": prefect, "tracking": mlflow}

    def tell() -> None:
        services.write_state(place, {**state, "parts": supervisor.processes()})

    supervisor = Supervisor(logs, tell)
    tell()
    try:
        databases = _databases(supervisor, place, postgres_port)
        for service, port in (
            (services.prefect_server(place, prefect_port, databases), prefect_port),
            (services.mlflow_server(place, mlflow_port, databases), mlflow_port),
        ):
            supervisor.start(service)
            services.wait_for(service, port, logs, lambda: supervisor.stopping)
        settings = {
            "PREFECT_API_URL": prefect,
            "PREFECT_API_AUTH_STRING": prefect_password(place),
            "MLFLOW_TRACKING_URI": mlflow,
            "PREFECT_WORKER_QUERY_SECONDS": str(POLL_WORK_S),
            "PREFECT_LOGGING_LEVEL": "INFO",
        }
        if not supervisor.stopping:
            _deploy(logs, settings)
        for service in [
            *workers(number, settings),
            Service("take-up", (*PYTHON, "flows.installation.orphans"), settings),
        ]:
            if not supervisor.stopping:
                supervisor.start(service)
        state["ready"] = True
        tell()
        supervisor.watch()
        # Flows stop first, then the sweeper that records their end, then the servers.
        supervisor.stop(*(service.name for service in supervisor.services if service.name.startswith("worker-")))
        supervisor.stop("take-up")
    except InputError as error:
        state["error"] = str(error)
        tell()
        return 2
    finally:
        supervisor.stop()
    (place / STATE).unlink(missing_ok=True)
    return 0


def _databases(supervisor: Supervisor, place: Path, postgres_port: int) -> Databases:
    if not postgres_port:
        return services.sqlite(place)
    from flows.installation.postgres import Cluster

    cluster = Cluster(place / POSTGRES, postgres_port)
    cluster.make()
    service = cluster.service()
    supervisor.start(service)
    services.wait_for(service, postgres_port, place / "logs", lambda: supervisor.stopping)
    cluster.make_databases()
    return cluster.databases()


def _deploy(logs: Path, settings: dict[str, str]) -> None:
    """Registers what is missing and what an upgrade changed; what people changed stays."""
    found = ["--gpus", str(len(gpus()))] if gpus() else []
    with (logs / "deploy.log").open("ab") as output:
        done = subprocess.run(
            [*PYTHON, "flows.cli", "deploy", "--yes", "--keep-changes", *found],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **settings, "PREFECT_LOGGING_LEVEL": "ERROR"},
        )
    if done.returncode != 0:
        raise InputError(f"the deployments could not be registered: {tail(logs / 'deploy.log')}")


if __name__ == "__main__":
    from flows.home import prepare_environment

    prepare_environment()
    sys.exit(supervise(*(int(value) for value in sys.argv[1:])))
