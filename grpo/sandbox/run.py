"""Runs an untrusted Python program, such as a model's answer, under limits and isolated from the rest of the system.

The isolation depends on the machine: `protections` reports it, docs/sandbox.md explains it. This is not a virtual
machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo.errors import InputError
from grpo.other_environments import FOUND_IN
from grpo.processes.lifetime import LINUX
from grpo.sandbox import scratch_dir, system_calls

Kind = Literal["ok", "error", "timeout", "memory", "processes", "output", "disk", "crash"]

_BOOTSTRAP = "import sys; sys.path.append({root!r}); from grpo.sandbox.supervisor import main; main()"
_ANSWER_S = 30.0
"""Seconds that the supervisor may take in addition to the program: to start, kill and clean up."""
_MARK = "SANDBOX_RUN"
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # the order of a set, and so what a program prints, is the same in every run
}


@dataclass(frozen=True)
class Limits:
    """Resources that one run may use. CPU time is per process, in whole seconds.

    A thread counts as a process; a file counts as at least 4 KiB of disk.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 1 << 30
    processes: int = 32
    disk_bytes: int = 16 << 20
    output_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not value > 0:
                raise InputError(f"sandbox limit {name} must be above 0, got {value}")


@dataclass(frozen=True)
class Result:
    """How a run ended, and its output, truncated at the limit.

    "ok" is exit code 0 and "error" any other. "crash": a signal ended it, or it destroyed its sandbox from within.
    Other kinds name the limit that it broke.
    """

    kind: Kind
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Means:
    """Kernel features that a sandbox uses, and the interpreter that it runs."""

    namespaces: bool
    own_user: bool
    own_files: bool
    python: str
    filtered: bool = False


def run(program: str, stdin: str, limits: Limits, means: Means | None = None) -> Result:
    """Runs `program` with `stdin`. Leaves no processes or files behind. Thread-safe.

    `means` is for tests; the default is the strongest that this machine allows. Raises RuntimeError if the sandbox
    itself cannot be set up, which says nothing about the program.
    """
    if len(program.encode(errors="replace")) > limits.disk_bytes:
        return Result("disk", "", "the program itself is larger than its disk")
    result = _run(program, stdin, limits, means or _means())
    if result["kind"] == "failed":
        raise RuntimeError(f"the sandbox cannot be set up: {result['stderr']}")
    return Result(**result)  # type: ignore[arg-type]


def protections(means: Means | None = None) -> dict[str, bool]:
    """Protections on this machine in addition to limits, timeouts and cleanup, which always apply."""
    means = means or _means()
    return {
        "no_network": means.namespaces,
        "sees_only_own_processes": means.namespaces and means.own_files,
        "cannot_signal_others": means.namespaces or os.geteuid() == 0,
        "sees_only_system_files": means.own_files,
        "writes_only_its_own_files": means.own_files or os.geteuid() == 0,
        "gains_no_namespaces": means.filtered,
    }


def missing_walls() -> str | None:
    """What programs can do on this machine because an isolation layer is missing, on one line; None if none is
    missing."""
    standing = protections()
    can = [text for wall, text in _WITHOUT.items() if not standing[wall]]
    return f"programs that a model wrote run here without these walls of the sandbox: {', '.join(can)}" if can else None


_WITHOUT = {
    "no_network": "they reach the network",
    "sees_only_system_files": "they read this user's files",
    "writes_only_its_own_files": "they write this user's files",
    "cannot_signal_others": "they can end this user's processes",
    "sees_only_own_processes": "they see other processes",
    "gains_no_namespaces": "they can make namespaces and hold memory beyond the limit",
}
"""Protection -> what a program can do without it."""


@functools.cache
def _means() -> Means:
    """The first of the candidates, strongest first, that can run a program."""
    reasons = []
    for means in _candidates():
        result = _run("print(6 * 7)", "", Limits(), means)
        if result["kind"] == "ok" and result["stdout"] == "42\n":
            return means
        reasons.append(f"{result['kind']} {result['stderr'].strip()[-200:]}")
    raise InputError(
        f"no untrusted program can be run here ({reasons[-1]}): either user namespaces must be allowed, or "
        f"{_interpreters()[0]} must be readable by every user"
    )


def _candidates() -> list[Means]:
    walls = [(False, False, False)]
    if LINUX:
        walls = [(True, True, True), (True, True, False), *walls]
        if os.geteuid() == 0:  # needs no user namespace, and can bind files that only root can read
            walls = [(True, False, True), walls[0], (True, False, False), *walls[1:]]
    # If the kernel has filters but refuses ours, the other layers are better than none.
    filters = [True, False] if system_calls.supported() else [False]
    return [Means(*wall, python, filtered) for filtered in filters for wall in walls for python in _interpreters()]


def _interpreters() -> list[str]:
    """Our interpreter without its virtual environment; the system's if ours is in a folder that other users cannot
    read."""
    ours = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    return [ours, *(path for path in ["/usr/bin/python3"] if os.path.exists(path) and os.path.realpath(path) != ours)]


def _run(program: str, stdin: str, limits: Limits, means: Means) -> dict[str, str]:
    mark = secrets.token_hex(16)
    folder = None if means.own_files else os.path.join(tempfile.gettempdir(), f"r1flow-sandbox-{mark}")
    order = {
        "program": program,
        "stdin": stdin,
        "limits": dataclasses.asdict(limits),
        "means": dataclasses.asdict(means),
        "command": [means.python, *_isolating(means.python)],
        "needed": _needed(means.python),
        "folder": folder,
        "environment": {**_ENVIRONMENT, _MARK: mark},
    }
    data = json.dumps(order).encode()
    supervisor = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BOOTSTRAP.format(root=FOUND_IN), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        answer = _answer(supervisor, data, limits.wall_s + _ANSWER_S)
    finally:
        _end(supervisor)
    if answer:
        return json.loads(answer)
    # Without namespaces a program under our own user can kill or stop its supervisor; then we clean up.
    _sweep(mark)
    if folder and os.path.isdir(folder):
        scratch_dir.remove(folder)
    return {"kind": "crash", "stdout": "", "stderr": "the program brought down its sandbox"}


@functools.cache
def _isolating(python: str) -> list[str]:
    """Options that keep the user's packages and the program's folder off an interpreter's path. -I does, and ignores
    PYTHON* too, of which the program has only our hash seed; it is for interpreters before 3.11, which have no -P."""
    new = [python, "-I", "-S", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    try:
        knows = subprocess.run(new, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:  # there is no such interpreter, which its first program will tell
        knows = False
    return ["-s", "-P"] if knows else ["-I"]


def _needed(python: str) -> list[str]:
    """The folders of an interpreter, none inside another."""
    ours = python == _interpreters()[0]
    prefixes = (sys.base_prefix, sys.base_exec_prefix) if ours else ()
    paths = {os.path.realpath(path) for path in (*prefixes, os.path.dirname(python))}
    return sorted(path for path in paths if not any(path.startswith(other + "/") for other in paths))


def _answer(supervisor: subprocess.Popen[bytes], order: bytes, limit_s: float) -> bytes:
    """The supervisor's answer; empty if it was killed or did not answer in time."""
    assert supervisor.stdin is not None and supervisor.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        supervisor.stdin.write(len(order).to_bytes(8, "big") + order)
        supervisor.stdin.flush()
    poller = select.poll()
    poller.register(supervisor.stdout, select.POLLIN)
    deadline = time.monotonic() + limit_s
    answer = bytearray()
    while poller.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
        piece = os.read(supervisor.stdout.fileno(), 1 << 16)
        if not piece:
            return bytes(answer)
        answer += piece
    supervisor.kill()  # stopped or hung
    return b""


def _end(supervisor: subprocess.Popen[bytes]) -> None:
    assert supervisor.stdin is not None and supervisor.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        supervisor.stdin.close()
    supervisor.stdout.close()
    try:
        supervisor.wait(_ANSWER_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()


def _sweep(mark: str) -> None:
    """Kills processes that still have the run's mark in their environment."""
    stopped: set[int] = set()
    while fresh := _marked(mark) - stopped:
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= fresh
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> set[int]:
    pids = set()
    for name in os.listdir("/proc") if LINUX else ():
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if name.isdigit() and f"{_MARK}={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                pids.add(int(name))
    return pids
