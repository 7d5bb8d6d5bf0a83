"""The two processes of one worker of `grpo.processes.pool`: a supervisor, and its child that runs the functions.

The supervisor only waits. When the child or the pool's process ends, even abruptly, it kills everything that the child
started. It imports only the standard library, so it is ready in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from grpo.errors import InputError
from grpo.processes.lifetime import LINUX, Alarm, adopt_orphans, die_with_parent, end_descendants

CLEANUP_S = 1.0
"""Seconds that a killed worker's remaining sandbox has to remove its folder."""
_HEADER = 8
MESSAGE_MAX = 300
"""Maximum length of a failure's message, characters."""


class AnswerFailure(Exception):
    """Raised by a verifier when the answer itself misbehaved, for example because its program ran too long.

    `kind` is the name under which it is counted ("code_timeout", ...).
    """

    def __init__(self, kind: str, message: str):
        super().__init__(kind, message)
        self.kind, self.message = kind, message


def send(connection: socket.socket, data: bytes, deadline: float | None = None) -> None:
    """Sends one message. Raises TimeoutError if the other side has not received it by `deadline` (time.monotonic)."""
    _wait_until(connection, deadline)
    connection.sendall(len(data).to_bytes(_HEADER, "big") + data)


def receive(connection: socket.socket, deadline: float | None = None) -> bytes:
    """Receives one message. Raises EOFError if the other side is gone, TimeoutError after `deadline`
    (time.monotonic)."""
    return _exactly(connection, int.from_bytes(_exactly(connection, _HEADER, deadline), "big"), deadline)


def _exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        _wait_until(connection, deadline)
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _wait_until(connection: socket.socket, deadline: float | None) -> None:
    if deadline is not None:
        connection.settimeout(max(deadline - time.monotonic(), 1e-6))


def main() -> NoReturn:
    """Runs a worker. ``argv``: the socket's descriptor and the pool's process id. Stdin closes when the pool ends."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    alarm = Alarm()
    die_with_parent(int(sys.argv[2]), signal.SIGTERM)
    adopt_orphans()
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        alarm.discard()
        die_with_parent(supervisor)
        _silence()
        with contextlib.suppress(EOFError, OSError):  # the pool is gone
            _work(connection)
        os._exit(0)
    connection.close()
    os._exit(_supervise(child, alarm))


def _supervise(child: int, alarm: Alarm) -> int:
    """Waits until the child or the pool ends. Returns the child's exit code, or 128 plus the signal that ended it."""
    poller = alarm.poller()
    poller.register(sys.stdin.fileno(), select.POLLIN)
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid or alarm.terminated or any(ready == sys.stdin.fileno() for ready, _ in poller.poll()):
            break
        alarm.reset()
    if not pid:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)  # SIGKILL, unless it has just ended by itself
    end_descendants(CLEANUP_S)
    if not LINUX:
        os.killpg(0, signal.SIGKILL)  # without /proc, only the process group can be found
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _silence() -> None:
    """Redirects what a verifier prints to stderr, and gives it an empty stdin."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)


def _work(connection: socket.socket) -> None:
    path, memory_bytes, prepare = pickle.loads(receive(connection))
    sys.path[:] = path
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reply, _ = _outcome(lambda: pickle.loads(prepare)() if prepare else None)
    send(connection, reply)
    while True:
        message = receive(connection)
        announce, payload = message[0], memoryview(message)[1:]
        try:
            function, args, kwargs = pickle.loads(payload)
        except Exception as error:
            text = f"a scoring worker cannot load what it is to run: {_line(error)}"
            send(connection, pickle.dumps(("input", text)))
            continue
        if announce:
            send(connection, b"")
        reply, exhausted = _outcome(lambda f=function, a=args, k=kwargs: f(*a, **k))
        send(connection, reply)
        if exhausted:
            return


def _outcome(call: Any) -> tuple[bytes, bool]:
    """Returns the reply to send, and whether this process ran out of memory and must not be reused."""
    exhausted = False
    reply: tuple[Any, ...]
    try:
        reply = ("value", call())
    except InputError as error:
        reply = ("input", str(error))
    except AnswerFailure as failure:
        reply = ("failure", failure.kind, " ".join(failure.message.split())[:MESSAGE_MAX], True, False)
    except BaseException as error:
        exhausted = isinstance(error, MemoryError)
        reply = ("failure", "error", _line(error), False, exhausted)
    try:
        return pickle.dumps(reply), exhausted
    except Exception as error:
        return pickle.dumps(
            ("failure", "error", f"the result cannot be sent: {_line(error)}", False, exhausted)
        ), exhausted


def _line(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "its message cannot be read"
    return f"{type(error).__name__}: {text}"[:MESSAGE_MAX]
