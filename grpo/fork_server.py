"""A process with torch and transformers loaded that forks trainers: ``python -m grpo.fork_server SOCKET PARENT``.

Loading torch and transformers takes seconds, longer than the work of many miniature stages. A fork of a process that
has loaded them starts immediately and shares no state with other trainers. Linux only, and not with a GPU: CUDA does
not survive a fork.

The socket is a file descriptor. Each message is one JSON object. A request is ``{"launch": 3, "arguments": [...],
"environment": {...}}`` with the log's descriptor and any others to keep open. The answers are ``{"launch": 3, "pid":
4711}`` from the trainer as soon as it has its own session, and ``{"launch": 3, "pid": 4711, "code": 0}`` when it has
ended, with the exit code of a subprocess. One trainer at a time.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import socket
import sys
from typing import Any

from grpo import train
from grpo.processes.lifetime import die_with_parent
from grpo.processes.loading import limited_loading, never_collected

LONGEST = 2**20
"""Maximum size of a message, bytes."""
_HELD = 8


def main(arguments: list[str]) -> int:
    """Forks a trainer for each job that comes over the socket. Returns the exit code."""
    connection, own = socket.socket(fileno=int(arguments[0])), os.getpid()
    die_with_parent(int(arguments[1]))
    with limited_loading(), never_collected():
        for runner in train.RUNNERS.values():
            importlib.import_module(runner.partition(":")[0])
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, LONGEST, _HELD)
        if not message:
            return 0
        request = json.loads(message)
        child = os.fork()
        if child == 0:
            return _become(request, own, connection, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(child, 0)
        say(connection, launch=request["launch"], pid=child, code=os.waitstatus_to_exitcode(status))


def _become(request: dict[str, Any], parent: int, connection: socket.socket, descriptors: list[int]) -> int:
    """Runs the trainer in the fork and returns its exit code. It dies with `parent`, even if `parent` is already
    dead."""
    os.setsid()
    say(connection, launch=request["launch"], pid=os.getpid())
    connection.close()
    log, *_ = descriptors  # the others stay open for the life of this process
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["environment"], R1FLOW_PARENT_PID=str(parent))
    random.seed()
    return train.main(request["arguments"])


def say(connection: socket.socket, **message: Any) -> None:
    """Sends one message as JSON."""
    connection.send(json.dumps(message).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
