"""Rewards that a user might have written, good and bad; recipes name them as module:function."""

from __future__ import annotations

import os
import time
from pathlib import Path

from grpo.data.records import Problem
from grpo.rewards.code import passes
from grpo.rewards.functions import Response


def brief(problem: Problem, response: Response, *, below: int = 9) -> float:
    """1 for completions of fewer than `below` tokens."""
    return float(response.tokens < below)


def letters(problem: Problem, response: Response) -> float:
    """The share of letters: the completions of a group hardly ever agree in it."""
    return sum(map(str.isalpha, response.text)) / max(1, len(response.text))


def takes_half_a_second(problem: Problem, response: Response) -> float:
    time.sleep(0.5)
    return 1.0


def doubtful(problem: Problem, response: Response) -> float:
    """It says that it is quick, and fails for completions that are empty."""
    return len(response.text) / len(response.text)


doubtful.quick = True  # type: ignore[attr-defined]


def broken(problem: Problem, response: Response) -> float:
    raise ZeroDivisionError("the user's mistake")


def first_is_best(problem: Problem, step: str) -> float:
    """A step reward."""
    return float(step.startswith("add"))


HOSTILE = {
    "endless": "while True: pass",
    "fork bomb": "import os\nwhile True: os.fork()",
    "memory hog": "x = []\nwhile True: x.append(bytearray(10**7))",
    "disk filler": "n = 0\nwhile True:\n    open(f'f{n}', 'wb').write(b'x' * 10**6); n += 1",
    "network client": "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2).sendall(b'got out')",
    "printer": "while True: print('x' * 1000)",
    "parent killer": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)",
}
VERIFIERS = ("hanging verifier", "dying verifier")


def hostile(problem: Problem, response: Response, *, folder: str, port: int) -> float:
    """Treats each completion as the next of the hostile programs, or is itself the trouble.

    The programs take turns: each call claims a number by making a file that no other call can make.
    """
    number = 0
    while True:
        try:
            (Path(folder) / str(number)).touch(exist_ok=False)
            break
        except FileExistsError:
            number += 1
    names = [*HOSTILE, *VERIFIERS]
    name = names[number % len(names)]
    if name == "hanging verifier":
        time.sleep(3600)
    if name == "dying verifier":
        os.abort()
    return passes(HOSTILE[name].replace("{port}", str(port)), [{"stdin": "", "stdout": "277"}])
