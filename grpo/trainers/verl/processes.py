"""verl's processes: they are started in verl's own environment, their output is passed on, and they end with this
process."""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpo.config.trainers import Verl
from grpo.distributed.rendezvous import ID, RANK, meeting_place
from grpo.errors import InputError, TrainingStopped
from grpo.other_environments import ALONE
from grpo.processes.lifetime import die_with_parent

POLL_S = 0.25
ENDING_S = 10.0
"""Seconds between SIGTERM and SIGKILL for the others once one has failed."""
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
"""A line of a traceback that names the exception; some exceptions have further lines."""
_VERSION = "import importlib.metadata as m, sys; print(m.version('verl'), *sys.version_info[:2])"


def check_environment(verl: Verl) -> None:
    """Raises InputError if the interpreter is missing, too old, or has another version of verl, or none."""
    try:
        asked = subprocess.run([verl.python, "-c", _VERSION], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"hardware.trainer.python: {verl.python} cannot be run ({error})") from None
    if asked.returncode != 0:
        raise InputError(
            f"hardware.trainer.python: {verl.python} has no verl; install it there: pip install verl=={verl.version}"
        )
    found, *python = asked.stdout.split()
    if found != verl.version:
        raise InputError(
            f"hardware.trainer.version is {verl.version}, but {verl.python} has verl {found}; set the version that is "
            "to be used, which is part of the key, or install it"
        )
    if [*map(int, python)] < [3, 11]:
        raise InputError(f"hardware.trainer.python: {verl.python} is Python {'.'.join(python)}; take 3.11 or newer")


@dataclass(frozen=True)
class Machine:
    """This machine among the `count` ones of a job, each with as many processes. Process 0 of the first one listens at
    `host` and `port`. `meeting`: a name that no other attempt has."""

    number: int
    count: int
    host: str
    port: int
    meeting: str

    @classmethod
    def of_environment(cls, count: int) -> Machine:
        """From torchrun's PET_ variables, as other trainers find each other. Raises InputError if they are missing."""
        if count == 1:
            return cls(0, 1, "127.0.0.1", _free_port(), str(os.getpid()))
        host, port = meeting_place(count)
        return cls(int(os.environ.get(RANK, "0")), count, host, port, os.environ.get(ID, ""))


def run_processes(
    command: Sequence[str], count: int, machine: Machine, variables: Mapping[str, str], poll: Callable[[], None]
) -> None:
    """Runs this machine's `count` processes of a PyTorch process group to their end, calling `poll` every 0.25 s. Their
    output goes to stdout, each line with its rank. `variables` are added to this process's environment. Raises
    TrainingStopped with the exception that ended the first one that fails."""
    world = count * machine.count
    group = {"MASTER_ADDR": machine.host, "MASTER_PORT": str(machine.port)}
    group |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(count)}
    environment = {**environment_of_verl(), **variables, **group}
    processes = []
    for local in range(count):
        rank = machine.number * count + local
        own = {"RANK": str(rank), "LOCAL_RANK": str(local)}
        processes.append(
            VerlProcess(f"process {rank} of {world} of verl", f"[rank{rank}]: ", command, environment | own)
        )
    run_to_end(processes, poll)


def run_to_end(processes: Sequence[VerlProcess], poll: Callable[[], None]) -> None:
    """Waits for the end of all processes, calling `poll` every 0.25 s. Once one has failed, or `poll` raises, the
    others are ended. Raises TrainingStopped with the exception that ended the first one that fails."""
    try:
        failed = None
        while failed is None and any(process.code is None for process in processes):
            time.sleep(POLL_S)
            poll()
            failed = next((process for process in processes if process.code), None)
        failed = failed or next((process for process in processes if process.code), None)
    finally:
        for process in processes:
            process.terminate()
        ending = time.monotonic() + ENDING_S
        for process in processes:
            process.end(ending)
    poll()
    if failed:
        raise TrainingStopped(f"{failed.name} ended with {failed.code}: {failed.said}")


def environment_of_verl() -> dict[str, str]:
    """This process's environment, with which verl's processes also find this library."""
    paths = os.pathsep.join([ALONE, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "HYDRA_FULL_ERROR": "1"}


class VerlProcess:
    """One process, and a thread that passes its output on, each line after `prefix`. `said`: the last exception that it
    printed, else the last line."""

    def __init__(self, name: str, prefix: str, command: Sequence[str], environment: Mapping[str, str]):
        self.name, self._prefix, self.said = name, prefix, "it printed nothing"
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        self._process.terminate()

    def end(self, until: float) -> None:
        """Waits for the end until that time of the monotonic clock, then kills the process."""
        try:
            self._process.wait(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=5)  # a grandchild may hold the pipe open

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip()
            text = text.removeprefix(self._prefix)  # torch writes the same before some lines
            if text.strip() and (_EXCEPTION.match(text) or not _EXCEPTION.match(self.said)):
                self.said = text
            print(f"{self._prefix}{text}", file=sys.stdout, flush=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
