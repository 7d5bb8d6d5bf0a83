"""`r1 ui`: serves both user interfaces on loopback, Prefect's (flows) and MLflow's (runs), until Ctrl-C. `r1 up` starts
more."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from flows.home import STATE, home, read_state
from flows.installation.services import (
    check_ports,
    living_supervisor,
    mlflow_server,
    mlflow_url,
    prefect_server,
    prefect_url,
    sign_in_url,
    sqlite,
    wait_for,
    write_state,
)
from flows.installation.supervisor import Supervisor
from grpo.errors import InputError
from tasks.trainer.processes import process_name


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("ui", help="Prefect and MLflow on this machine, until Ctrl-C")
    command.add_argument("--prefect-port", type=int, default=4200)
    command.add_argument("--mlflow-port", type=int, default=5000)


def run(args: argparse.Namespace) -> int:
    """Serves Prefect and MLflow until Ctrl-C. Returns the exit code."""
    return serve(args.prefect_port, args.mlflow_port)


def serve(prefect_port: int, mlflow_port: int) -> int:
    """Starts both servers, prints their addresses, and keeps them alive until this process is stopped.

    Raises:
        InputError: this home's servers are up already. Its databases and its state file are for one pair of servers.
    """
    place, logs = home(), home() / "logs"
    if living_supervisor(place):
        state = read_state(place)
        known = {"Prefect": str(state.get("prefect", "")).removesuffix("/api"), "MLflow": state.get("tracking")}
        said = ", ".join(f"{name} at {url}" for name, url in known.items() if url)
        raise InputError(f"the servers of {place} are up{f': {said}' if said else ''}; `r1 down` stops them")
    check_ports({"--prefect-port": prefect_port, "--mlflow-port": mlflow_port})
    place.mkdir(parents=True, exist_ok=True)
    supervisor, me = Supervisor(logs), {"supervisor": process_name(os.getpid())}
    write_state(place, me)
    try:
        for service, port in (
            (prefect_server(place, prefect_port, sqlite(place)), prefect_port),
            (mlflow_server(place, mlflow_port, sqlite(place)), mlflow_port),
        ):
            supervisor.start(service)
            wait_for(service, port, logs, lambda: supervisor.stopping)
        write_state(place, {**me, "prefect": prefect_url(prefect_port)})
        print(f"Prefect: {sign_in_url(place, prefect_port)}\nMLflow:  {mlflow_url(mlflow_port)}", flush=True)
        print("`r1 run` uses this server while it is up. Ctrl-C stops both.", file=sys.stderr)
        supervisor.watch()
    finally:
        if read_state(place).get("supervisor") == me["supervisor"]:  # not that of an `r1 up` at the same moment
            (place / STATE).unlink(missing_ok=True)
        supervisor.stop()
    return 0
