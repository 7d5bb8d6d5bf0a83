"""The cluster of Ray on which verl's RL trainer runs: on one machine it starts its own, several form one here."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo.config.trainers import Verl
from grpo.errors import TrainingStopped
from grpo.processes.metrics_log import replace_text
from grpo.trainers.verl.processes import ENDING_S, POLL_S, Machine, VerlProcess, environment_of_verl

_ALGORITHMS = "grpo.trainers.verl.plugins.algorithms"
_MODULES = "VERL_USE_EXTERNAL_MODULES"
"""Modules, separated by commas, that each of verl's processes imports."""
_MARK = "R1FLOW_VERL"
"""Variable by which the processes that Ray starts are known."""
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


@dataclass(frozen=True)
class ClusterPart:
    """This machine's part of the cluster. `environment`: of verl's driver. `address`: of the cluster; "local" for one
    that the driver starts, whatever else runs on this machine."""

    machine: Machine
    environment: Mapping[str, str]
    address: str
    process: VerlProcess | None = None

    @property
    def handed_on(self) -> dict[str, str]:
        """What processes on all machines must have in their environment."""
        return {name: self.environment[name] for name in (_MODULES, "PYTHONPATH")}

    def check(self) -> None:
        """Raises TrainingStopped if Ray has ended on this machine."""
        if self.process is not None and self.process.code is not None:
            raise TrainingStopped(f"Ray ended on machine {self.machine.number}: {self.process.said}")


@contextlib.contextmanager
def cluster(verl: Verl, machine: Machine, folder: Path) -> Iterator[ClusterPart]:
    """Context in which the machines of a job form a cluster of Ray, if there are several. Who has not read the token in
    `folder`, which the machines share, cannot use it. At the end of the context, all processes that were started in
    its environment are gone from this machine."""
    mark = {_MARK: secrets.token_hex(8)}
    modules = ",".join([*filter(None, [os.environ.get(_MODULES)]), _ALGORITHMS])
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(_token(folder, machine))}
    environment = {**environment_of_verl(), **_QUIET, **token, _MODULES: modules, **mark}
    try:
        if machine.count == 1:
            yield ClusterPart(machine, environment, "local")
            return
        place = f"{machine.host}:{machine.port}"
        head = ["--head", f"--node-ip-address={machine.host}", f"--port={machine.port}", "--include-dashboard=false"]
        command = [str(verl.python), "-m", "ray.scripts.scripts", "start", "--block"]
        if machine.number > 0:
            _wait_for_head(machine)
        process = VerlProcess(
            "Ray", "[ray]: ", [*command, *(head if machine.number == 0 else [f"--address={place}"])], environment
        )
        try:
            yield ClusterPart(machine, environment, place, process)
        finally:
            process.terminate()
            process.end(time.monotonic() + ENDING_S)
    finally:
        _end_marked(mark)


def _token(folder: Path, machine: Machine) -> Path:
    """A file with a secret that only the user may read. The first machine makes it, once for all attempts."""
    path = folder / "ray_token"
    if machine.number == 0 and not path.exists():
        replace_text(path, secrets.token_hex(32), private=True)
    while not path.exists():  # the launcher ends this process if the first machine's fails
        time.sleep(POLL_S)
    return path


def _wait_for_head(machine: Machine) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection((machine.host, machine.port), timeout=ENDING_S):
            return
        time.sleep(POLL_S)


def _end_marked(mark: Mapping[str, str]) -> None:
    """Waits for the processes that inherited this variable of the environment, and kills those that stay."""
    ending = time.monotonic() + ENDING_S
    while (left := _marked(mark)) and time.monotonic() < ending:
        time.sleep(POLL_S)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _marked(mark: Mapping[str, str]) -> list[int]:
    """Ids of the processes whose environment has these variables; dead ones have none."""
    variables = {f"{name}={value}".encode() for name, value in mark.items()}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if variables <= {*(folder / "environ").read_bytes().split(b"\0")}:
                found.append(int(folder.name))
    return found
