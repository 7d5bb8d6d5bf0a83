"""A process that has loaded what trainers load, and becomes one each time that it is asked to: ``python -m
grpo.fork_server SOCKET PARENT``.

Loading torch and transformers takes seconds, which a stage in miniature spends more on than on its work. A fork of a
process that has done it begins at once and knows nothing of other trainers. Linux only, and not where there is a GPU:
CUDA does not survive a fork.

The socket is a file descriptor. A message is one JSON object; the first asks, the two others answer:
``{"launch": 3, "arguments": [...], "environment": {...}}`` with the log's descriptor and any others to hold,
``{"launch": 3, "pid": 4711}`` from the trainer as soon as it has a session of its own, and
``{"launch": 3, "pid": 4711, "code": 0}`` when it has ended, as of a subprocess. One trainer at a time.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import socket
import sys
from typing import Any

from grpo import train
from grpo.processes.lifetime import die_with_parent

LONGEST = 2**20
"""Bytes of a message, at most."""
_HELD = 8


def main(arguments: list[str]) -> int:
    """Forks a trainer for each job that comes over the socket. Returns the exit code."""
    connection, own = socket.socket(fileno=int(arguments[0])), os.getpid()
    die_with_parent(int(arguments[1]))
    for runner in train.RUNNERS.values():
        importlib.import_module(runner.partition(":")[0])
    gc.freeze()  # what is loaded stays shared with the trainers, whose collections would touch all of it
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
    """Be the trainer, whose exit code this is. It dies with `parent`, also if that is dead already."""
    os.setsid()
    say(connection, launch=request["launch"], pid=os.getpid())
    connection.close()
    log, *_ = descriptors  # the others stay open as long as this process lives
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
