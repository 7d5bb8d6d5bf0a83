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
from pathlib import Path

import grpo
from grpo.config.trainers import Verl
from grpo.distributed.rendezvous import ID, RANK, meeting_place
from grpo.errors import InputError, TrainingStopped
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
    here = str(Path(grpo.__file__).parents[1])  # what verl loads of ours imports grpo
    paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    world = count * machine.count
    group = {"MASTER_ADDR": machine.host, "MASTER_PORT": str(machine.port)}
    group |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(count)}
    environment = {**os.environ, "PYTHONPATH": paths, "HYDRA_FULL_ERROR": "1", **variables, **group}
    ranks = [_Rank(machine.number * count + local, local, command, environment) for local in range(count)]
    try:
        failed = None
        while failed is None and any(rank.process.poll() is None for rank in ranks):
            time.sleep(POLL_S)
            poll()
            failed = next((rank for rank in ranks if rank.process.poll()), None)
        failed = failed or next((rank for rank in ranks if rank.code), None)
    finally:
        for rank in ranks:
            rank.process.terminate()
        ending = time.monotonic() + ENDING_S
        for rank in ranks:
            rank.end(ending)
    poll()
    if failed:
        raise TrainingStopped(f"process {failed.rank} of {world} of verl ended with {failed.code}: {failed.said}")


class _Rank:
    """One process, and a thread that passes its output on. `said`: the last exception that it printed, else the last
    line."""

    def __init__(self, rank: int, local: int, command: Sequence[str], environment: Mapping[str, str]):
        self.rank, self.said = rank, "it printed nothing"
        self.process = subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(local)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def end(self, until: float) -> None:
        """Waits for the end until that time of the monotonic clock, then kills the process."""
        try:
            self.process.wait(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(timeout=5)  # a grandchild may hold the pipe open

    def _pass_on(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode(errors="replace").rstrip().removeprefix(f"[rank{self.rank}]: ")  # torch's own prefix
            if text.strip() and (_EXCEPTION.match(text) or not _EXCEPTION.match(self.said)):
                self.said = text
            print(f"[rank{self.rank}]: {text}", file=sys.stdout, flush=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
