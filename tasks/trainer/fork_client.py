"""Trainers that begin at once: forks of one process that has loaded everything, for as long as a recipe runs here.

Only where that is safe and of use: see grpo/fork_server.py. Outside of `warm_trainers`, or when the process is gone, a
trainer is a subprocess like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from grpo.fork_server import LONGEST

TRAINER = [sys.executable, "-m", "grpo.train", "--processes", "1", "--nodes", "1"]
"""How the command of a trainer begins that is one process."""
MARK = "R1FLOW_LAUNCH"
"""By this variable the processes of a trainer are found."""
OWN = {"R1FLOW_PARENT_PID", MARK}
"""What of an environment is each trainer's own; nothing reads it while it is loaded."""
_ACCELERATORS = ("nvidia[0-9]*", "kfd")

_allowed = False
_warm: _Warm | None = None


@contextlib.contextmanager
def warm_trainers() -> Iterator[None]:
    """In the block trainers may be forks."""
    global _allowed, _warm
    before, _allowed = _allowed, sys.platform == "linux" and not any(any(Path("/dev").glob(n)) for n in _ACCELERATORS)
    try:
        yield
    finally:
        _allowed = before
        if not _allowed and _warm is not None:
            _warm.close()
            _warm = None


def load(environment: Mapping[str, str]) -> None:
    """Begin to load what trainers need, if they may be forks; `environment` is theirs."""
    global _warm
    if _allowed and _warm is None:
        _warm = _Warm(environment)


def forked(
    command: Sequence[str], log: IO[bytes], environment: Mapping[str, str], held: Sequence[int]
) -> Forked | None:
    """The trainer that `command` starts, as a fork; None if it has to be a process from the beginning."""
    global _warm
    if _warm is None or [*command[: len(TRAINER)]] != TRAINER or _warm.environment != _common(environment):
        return None
    try:
        return _warm.fork(command[3:], log, environment, held)
    except OSError:  # it is gone
        _warm.close()
        _warm = None
        return None


class _Warm:
    """The process, and what it said so far."""

    def __init__(self, environment: Mapping[str, str]):
        self.environment = _common(environment)
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "grpo.fork_server", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a trainer that cannot be loaded says so in its own log
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.launches = 0
        self.said: dict[int, dict[str, int]] = {}

    def fork(
        self, arguments: Sequence[str], log: IO[bytes], environment: Mapping[str, str], held: Sequence[int]
    ) -> Forked:
        """Raises OSError if the process is gone."""
        self.launches += 1
        own = {name: environment[name] for name in OWN & environment.keys()}
        asked = {"launch": self.launches, "arguments": [*arguments], "environment": own}
        socket.send_fds(self.connection, [json.dumps(asked).encode()], [log.fileno(), *held])
        while "pid" not in self.hear(self.launches, None):
            pass
        return Forked(self, self.launches)

    def hear(self, launch: int, seconds: float | None) -> dict[str, int]:
        """All that was said of a launch, after at most one more message, for which it waits `seconds`.

        Raises:
            ConnectionError: the process is gone, and its trainer with it.
        """
        ready, _, _ = select.select([self.connection], [], [], seconds)
        if ready:
            message = self.connection.recv(LONGEST)
            if not message:
                raise ConnectionError("the warm process is gone")
            heard: dict[str, Any] = json.loads(message)
            self.said.setdefault(heard.pop("launch"), {}).update(heard)
        return self.said.get(launch, {})

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


class Forked:
    """A trainer that was forked, with what is needed of subprocess.Popen."""

    def __init__(self, warm: _Warm, launch: int):
        self._warm, self._launch = warm, launch
        self.pid = warm.said[launch]["pid"]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._hear(0)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self._hear(max(0.0, deadline - time.monotonic()))) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(["grpo.train"], timeout)
        return code

    def _hear(self, seconds: float) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._warm.hear(self._launch, seconds).get("code")
            except OSError:
                self.returncode = -signal.SIGKILL  # it dies with the process that it was forked from
        return self.returncode


def _common(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OWN}
