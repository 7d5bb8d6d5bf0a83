"""Trainers that start instantly: forks of a fork server, a process that has already loaded torch and transformers.

Used only if that is safe and saves time; see grpo/fork_server.py. Outside of `fork_server`, or if the fork server is
gone, a trainer is an ordinary subprocess.
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
"""First words of the command of a trainer with one process. Only such trainers can be forks."""
MARK = "R1FLOW_LAUNCH"
"""The environment variable that identifies the processes of a trainer."""
PER_TRAINER = {"R1FLOW_PARENT_PID", MARK}
"""Environment variables that differ between trainers. Nothing reads them while modules are loaded."""
_ACCELERATORS = ("nvidia[0-9]*", "kfd")

_allowed = False
_server: ForkServer | None = None


@contextlib.contextmanager
def fork_server() -> Iterator[None]:
    """Inside the block, trainers may be forks. The fork server ends with the outermost block."""
    global _allowed, _server
    before, _allowed = _allowed, sys.platform == "linux" and not any(any(Path("/dev").glob(n)) for n in _ACCELERATORS)
    try:
        yield
    finally:
        _allowed = before
        if not _allowed and _server is not None:
            _server.close()
            _server = None


def preload(environment: Mapping[str, str]) -> None:
    """Starts the fork server, which loads what trainers need, if trainers may be forks. `environment` is the trainers'
    environment."""
    global _server
    if _allowed and _server is None:
        _server = ForkServer(environment)


def fork_trainer(
    command: Sequence[str], log: IO[bytes], environment: Mapping[str, str], inherited: Sequence[int]
) -> ForkedTrainer | None:
    """Forks the trainer that `command` describes. `inherited` are file descriptors that it keeps open.

    Returns None if the trainer cannot be a fork and has to start as a subprocess.
    """
    global _server
    if _server is None or [*command[: len(TRAINER)]] != TRAINER or _server.environment != _common(environment):
        return None
    try:
        return _server.fork(command[3:], log, environment, inherited)
    except OSError:  # the fork server is gone
        _server.close()
        _server = None
        return None


class ForkServer:
    """The fork server's process, and its messages by launch number."""

    def __init__(self, environment: Mapping[str, str]):
        self.environment = _common(environment)
        self.connection, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "grpo.fork_server", str(server_end.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # import errors show up again in the log of the subprocess that replaces it
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[server_end.fileno()],
                start_new_session=True,
            )
        self.launches = 0
        self.messages: dict[int, dict[str, int]] = {}

    def fork(
        self, arguments: Sequence[str], log: IO[bytes], environment: Mapping[str, str], inherited: Sequence[int]
    ) -> ForkedTrainer:
        """Starts a trainer. Raises OSError if the fork server is gone."""
        self.launches += 1
        own = {name: environment[name] for name in PER_TRAINER & environment.keys()}
        request = {"launch": self.launches, "arguments": [*arguments], "environment": own}
        socket.send_fds(self.connection, [json.dumps(request).encode()], [log.fileno(), *inherited])
        while "pid" not in self.receive(self.launches, None):
            pass
        return ForkedTrainer(self, self.launches)

    def receive(self, launch: int, seconds: float | None) -> dict[str, int]:
        """Everything reported about a launch ("pid", "code"), after waiting up to `seconds` for one more message.

        Raises:
            ConnectionError: the fork server is gone, and its trainer with it.
        """
        ready, _, _ = select.select([self.connection], [], [], seconds)
        if ready:
            message = self.connection.recv(LONGEST)
            if not message:
                raise ConnectionError("the fork server is gone")
            values: dict[str, Any] = json.loads(message)
            self.messages.setdefault(values.pop("launch"), {}).update(values)
        return self.messages.get(launch, {})

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


class ForkedTrainer:
    """A forked trainer, with the part of subprocess.Popen's interface that is used here."""

    def __init__(self, server: ForkServer, launch: int):
        self._server, self._launch = server, launch
        self.pid = server.messages[launch]["pid"]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._receive(0)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self._receive(max(0.0, deadline - time.monotonic()))) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(["grpo.train"], timeout)
        return code

    def _receive(self, seconds: float) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._server.receive(self._launch, seconds).get("code")
            except OSError:
                self.returncode = -signal.SIGKILL  # a trainer dies with the fork server
        return self.returncode


def _common(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in PER_TRAINER}
