"""Starts, watches and stops the processes of a trainer.

A trainer has its own session and process group, so that a stop reaches all of it. Workers that torchrun starts move to
sessions of their own. They are found by a mark in the environment, which they inherit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from grpo.config.common import Hardware
from grpo.processes.cpu_instructions import instruction_variables
from tasks.trainer.fork_client import MARK, ForkedTrainer, fork_trainer
from tasks.trainer.interpreter import library_path, trainer_python
from tasks.trainer.outcome import StageFailed

logger = logging.getLogger(__name__)

POLL_S = 0.25
GRACE_S = 20.0
"""Seconds between SIGTERM and SIGKILL, for writing a checkpoint. Prefect's workers allow 30 s in total."""
REPEAT_S = 2.0
"""Seconds in which a second signal is the first one again: Slurm signals a job's processes and its script, which hands
the signal on."""
_KILL_S = 10.0
STOPPED_S = 5.0
"""Seconds between two checks for stopped processes."""

Child = subprocess.Popen[bytes] | ForkedTrainer


def command(job_path: Path, processes: int, nodes: int = 1) -> list[str]:
    """The command that runs the job here: one Python process, or torchrun with one process per accelerator."""
    counts = ["--processes", str(processes), "--nodes", str(nodes)]
    return [trainer_python(), "-m", "grpo.train", *counts, str(job_path)]


def run_watched(
    arguments: list[str],
    log_path: Path,
    environment: Mapping[str, str],
    mark: str,
    poll: Callable[[], None],
    lock_fd: int | None = None,
) -> int:
    """Runs a trainer to its end and returns its exit code, calling `poll` every 0.25 s.

    If anything ends this call early, including an exception from `poll`, every process of the trainer is stopped first.
    """
    with log_path.open("ab") as log, _sigterm_raises():
        inherited = [] if lock_fd is None else [lock_fd]
        child = fork_trainer(arguments, log, environment, inherited) or subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
            pass_fds=inherited,
        )
        stopped = _StoppedWatch(child, mark)
        try:
            while child.returncode is None:
                try:
                    child.wait(timeout=POLL_S)
                except subprocess.TimeoutExpired:
                    poll()
                    stopped.look()
        finally:
            _stop(child, mark)  # also after a normal end, because a data loader or worker may be left running
    return child.returncode


def trainer_environment(extra: Mapping[str, str], mark: str, hardware: Hardware) -> dict[str, str]:
    """The environment of a trainer; `mark` identifies its processes."""
    env = {**os.environ, **extra}
    env |= instruction_variables(env, hardware.dtype)
    if (processes := hardware.processes) > 1:  # torchrun's default of 1 thread wastes a host with many cores
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # The trainer imports the same grpo as this process, wherever the flow was started.
    env["PYTHONPATH"] = os.pathsep.join([library_path(), *filter(None, [env.get("PYTHONPATH")])])
    # Unbuffered, so that the last message is the last line of the log even after a kill.
    return env | {"R1FLOW_PARENT_PID": str(os.getpid()), "PYTHONUNBUFFERED": "1", MARK: mark}


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turns a SIGTERM that would end this process at once into SystemExit(143).

    SIGINT already raises KeyboardInterrupt, and Prefect's handler raises its own exception. That handler must stay
    installed, because Prefect uses it to tell a cancellation from a crash. Only the main thread can set handlers.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop(child: Child, mark: str) -> None:
    """Sends SIGTERM, waits for a checkpoint, sends SIGKILL. Returns only when no process of the trainer is left.

    A second Ctrl-C or SIGTERM ends the grace period early, but not in the first REPEAT_S seconds.
    """
    began, told, repeated = time.monotonic(), False, None
    try:
        while True:
            try:
                if not told:
                    _send_signal(child, mark, signal.SIGTERM)
                    _send_signal(child, mark, signal.SIGCONT)  # a stopped process reacts to nothing else
                    told = True
                _await_end(child, mark, began + GRACE_S - time.monotonic())
                break
            except BaseException as error:
                if time.monotonic() > began + REPEAT_S:
                    raise
                repeated = error
    finally:
        if alive := _live_processes(child, mark):
            logger.warning("trainer processes %s outlived SIGTERM; killing them", alive)
            _send_signal(child, mark, signal.SIGKILL)
            if alive := _await_end(child, mark, _KILL_S):
                raise StageFailed(f"processes {alive} of the trainer survived SIGKILL; end them before trying again")
    if repeated is not None:
        raise repeated


def _await_end(child: Child, mark: str, seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (alive := _live_processes(child, mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def _send_signal(child: Child, mark: str, number: signal.Signals) -> None:
    for pid in _live_processes(child, mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class _StoppedWatch:
    """Warns about processes that SIGSTOP or a terminal has stopped: a run would otherwise wait for them silently,
    forever.

    Does nothing else about them, because someone may have stopped them on purpose.
    """

    def __init__(self, child: Child, mark: str):
        self._child, self._mark = child, mark
        self._known: set[int] = set()
        self._next = time.monotonic() + STOPPED_S

    def look(self) -> None:
        """Warns about processes that have been stopped since the last check."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + STOPPED_S
        stopped = {pid for pid in _live_processes(self._child, self._mark) if _is_stopped(pid)}
        for pid in sorted(stopped - self._known):
            logger.warning(
                "process %d of the trainer is stopped (by SIGSTOP?); the run waits, and `kill -CONT %d` continues it",
                pid,
                pid,
            )
        self._known = stopped


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):  # it has ended in the meantime, or this is not Linux
        return False


def _live_processes(child: Child, mark: str) -> list[int]:
    """Ids of the trainer's live processes: its process group and all processes with its mark, without zombies."""
    child.poll()  # reaps the leader if it has ended
    if not Path("/proc/self/stat").exists():  # not Linux: only the group can be checked
        try:
            os.killpg(child.pid, 0)
        except (ProcessLookupError, PermissionError):
            return []
        return [-child.pid]  # os.kill sends to the whole group
    marked = f"{MARK}={mark}".encode()
    pids = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            # After the last ")" come state, parent and group; the process name before it may contain anything.
            state, _, group = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:3]
            if state in (b"Z", b"X"):
                continue
            if int(group) == child.pid or marked in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
        except (OSError, ValueError):  # it has ended in the meantime, or belongs to another user
            continue
    return pids
