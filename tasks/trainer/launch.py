"""Running a trainer: a subprocess that is watched, stopped when the flow stops, and believed only with proof.

The trainer has its own session and process group, so a stop reaches all of it. Workers that torchrun starts leave
that group for sessions of their own; they are found by a mark in their environment, which they inherit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpo
from grpo.config.common import Hardware
from grpo.errors import InputError
from tasks.trainer.fork_client import MARK, Forked, forked, load
from tasks.trainer.rendezvous import ENDPOINT, RANK, Meeting

logger = logging.getLogger(__name__)

POLL_S = 0.25
GRACE_S = 20.0
"""What a trainer gets between SIGTERM and SIGKILL to write a checkpoint; Prefect's workers grant 30 s in all."""
_KILL_S = 10.0
_LOG_TAIL = 65_536


Child = subprocess.Popen[bytes] | Forked


class StageFailed(RuntimeError):
    """A stage did not do its work: the message says how it ended and where its log lies."""


def command(job_path: Path, processes: int, nodes: int = 1) -> list[str]:
    """What runs the job here: one Python process, or torchrun with one process per accelerator."""
    counts = ["--processes", str(processes), "--nodes", str(nodes)]
    return [sys.executable, "-m", "grpo.train", *counts, str(job_path)]


def load_ahead() -> None:
    """Load what the next trainer here needs while something else is done, where trainers may be forks."""
    load(trainer_environment({}, "", 1))


def launch(
    job: dict[str, Any],
    work: Path,
    *,
    on_metrics: Callable[[list[dict[str, Any]]], None],
    meeting: Meeting | None = None,
    time_limit_s: float | None = None,
    lock_fd: int | None = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Train as `job` says, in as many processes as its hardware says, and return the trainer's result.json.

    `on_metrics` gets each new record of metrics.jsonl once. A job for several machines calls the others through
    `meeting`. Whatever ends this call early (an exception, Ctrl-C, a cancellation, the time limit) stops every process
    of the trainer before it leaves.

    Raises:
        InputError: the trainer refused its input (exit code 2); the message is the trainer's.
        StageFailed: it crashed, ran past `time_limit_s` seconds, or finished fewer steps than it planned.
    """
    hardware = hardware_of(job)
    processes, nodes = hardware.processes, hardware.nodes
    work.mkdir(parents=True, exist_ok=True)
    job_path, log_path, result_path = work / "job.json", work / "trainer.log", work / "result.json"
    _write(job_path, job)
    result_path.unlink(missing_ok=True)  # an earlier attempt's proof proves nothing about this one
    metrics = _Tail(work / "metrics.jsonl")
    log_start = log_path.stat().st_size if log_path.exists() else 0
    mark = uuid.uuid4().hex
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s

    def poll() -> None:
        if records := metrics.read():
            on_metrics(records)
        if deadline is not None and time.monotonic() > deadline:
            raise StageFailed(f"the trainer ran past its limit of {time_limit_s:g} s and was stopped; log: {log_path}")

    with _called(meeting, job_path, processes, nodes) as of_meeting:
        environment = trainer_environment({**(env or {}), **of_meeting}, mark, processes)
        try:
            code = watched(command(job_path, processes, nodes), log_path, environment, mark, poll, lock_fd)
        except BaseException:
            # What it wrote during its grace; the next attempt begins to read after it.
            if records := metrics.read():
                with contextlib.suppress(Exception):
                    on_metrics(records)
            raise
    if records := metrics.read():
        on_metrics(records)
    return _result(code, processes * nodes, result_path, log_path, log_start)


def hardware_of(job: Mapping[str, Any]) -> Hardware:
    """The hardware of a job that is still plain JSON."""
    return Hardware.model_validate(job.get("hardware") or (job.get("settings") or {}).get("hardware") or {})


@contextlib.contextmanager
def _called(meeting: Meeting | None, job_path: Path, processes: int, nodes: int) -> Iterator[dict[str, str]]:
    if nodes == 1:
        yield {}
    elif meeting is None:
        raise InputError(
            f"hardware.nodes is {nodes}, but nothing says where the machines meet: set {ENDPOINT} to HOST:PORT of the "
            f"first one, the same on all, and {RANK} to 0 there and to 1, 2, ... on the others"
        )
    else:
        with meeting.announce(job_path, processes, nodes) as of_meeting:
            yield of_meeting


def watched(
    arguments: list[str],
    log_path: Path,
    environment: Mapping[str, str],
    mark: str,
    poll: Callable[[], None],
    lock_fd: int | None = None,
) -> int:
    """Run a trainer to its end and return its exit code; `poll` is called all along. What ends this call early, an
    exception of `poll` too, stops all of the trainer first."""
    with log_path.open("ab") as log, _sigterm_raises():
        held = [] if lock_fd is None else [lock_fd]
        child = forked(arguments, log, environment, held) or subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
            pass_fds=held,
        )
        try:
            while child.returncode is None:
                try:
                    child.wait(timeout=POLL_S)
                except subprocess.TimeoutExpired:
                    poll()
        finally:
            _stop(child, mark)  # also after a normal end: a data loader or a worker may have been left behind
    return child.returncode


def trainer_environment(extra: Mapping[str, str], mark: str, processes: int) -> dict[str, str]:
    """What a trainer inherits; `mark` is how its processes are found."""
    env = {**os.environ, **extra}
    if processes > 1:  # what torchrun would choose, 1, wastes a host with many cores
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # The trainer imports the grpo that this process imports, from wherever the flow was started.
    home = str(Path(grpo.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join([home, *filter(None, [env.get("PYTHONPATH")])])
    # Unbuffered, so that what it said last is what stands last in the log.
    return env | {"R1FLOW_PARENT_PID": str(os.getpid()), "PYTHONUNBUFFERED": "1", MARK: mark}


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn a SIGTERM that would end this process at once into SystemExit(143).

    SIGINT already raises KeyboardInterrupt, and Prefect's handler raises its own exception. That handler must stay
    installed: Prefect tells a cancellation from a crash by it. Only the main thread may set handlers.
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
    """SIGTERM, time to write a checkpoint, SIGKILL; returns only when no process of the trainer is left.

    A second Ctrl-C or SIGTERM during the grace cuts it short.
    """
    try:
        _signal(child, mark, signal.SIGTERM)
        _await_end(child, mark, GRACE_S)
    finally:
        if left := _members(child, mark):
            logger.warning("trainer processes %s outlived SIGTERM; killing them", left)
            _signal(child, mark, signal.SIGKILL)
            if left := _await_end(child, mark, _KILL_S):
                raise StageFailed(f"processes {left} of the trainer survived SIGKILL; end them before trying again")


def _await_end(child: Child, mark: str, seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := _members(child, mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _signal(child: Child, mark: str, number: signal.Signals) -> None:
    for pid in _members(child, mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _members(child: Child, mark: str) -> list[int]:
    """The trainer's live processes: its group, and whatever carries its mark. Zombies are dead."""
    child.poll()  # reaps the leader
    if not Path("/proc/self/stat").exists():  # not Linux: the group is all that can be known
        try:
            os.killpg(child.pid, 0)
        except (ProcessLookupError, PermissionError):
            return []
        return [-child.pid]  # what os.kill takes for the whole group
    wanted = f"{MARK}={mark}".encode()
    members = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            # After the last ")" come state, parent and group; the name before it may hold anything.
            state, _, group = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:3]
            if state in (b"Z", b"X"):
                continue
            if int(group) == child.pid or wanted in (folder / "environ").read_bytes().split(b"\0"):
                members.append(int(folder.name))
        except (OSError, ValueError):  # gone meanwhile, or another user's
            continue
    return members


class _Tail:
    """The records that are added to a JSON-lines file after this object was made; whole lines only."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._warned = False

    def read(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0  # a resumed trainer took back what it had written past its checkpoint
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole + newline)
        return [record for line in whole.splitlines() if (record := self._parse(line))]

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record["step"], int):
                return record
        except (ValueError, KeyError):
            pass
        if line.strip() and not self._warned:
            logger.warning("%s: skipping a line that is no record with a step: %r", self._path, line[:200])
            self._warned = True
        return None


def _result(code: int, processes: int, result_path: Path, log_path: Path, log_start: int) -> dict[str, Any]:
    """What the trainer says it did, or an error that says why it did not; an exit code alone is never trusted."""
    if code != 0:
        raise failure(code, processes, log_path, log_start)
    try:
        result = json.loads(result_path.read_text(encoding="utf-8"))
        completed, planned = int(result["steps_completed"]), int(result["steps_planned"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = (
            "without writing result.json"
            if isinstance(error, FileNotFoundError)
            else f"with a bad result.json ({error!r})"
        )
        raise StageFailed(f"the trainer exited with 0 but {reason}; log: {log_path}") from None
    if completed < planned:
        raise StageFailed(f"the trainer exited with 0 after {completed} of {planned} planned steps; log: {log_path}")
    return result


def failure(code: int, processes: int, log_path: Path, log_start: int) -> Exception:
    """What to raise for a trainer of so many processes on all machines, by the log of this one's."""
    text, who = _log_text(log_path, log_start), "the trainer"
    last = text.rstrip().rpartition("\n")[2]
    if processes > 1 and not last.startswith("error: "):  # else the last word is not a worker's but about the others
        # torchrun exits with 1 whatever happened, reports the first failure last, and buries the worker's own words:
        # they stand before its first line, and torch puts a worker's rank before the lines of its traceback.
        rank = "0"
        if causes := re.findall(r"^\s*rank\s*: (\d+) \(.*\n\s*exitcode\s*: (-?\d+) \(pid", text, re.MULTILINE):
            rank, code = causes[-1][0], int(causes[-1][1])
            who = f"process {rank} of {processes} of the trainer"
        text = re.split(r"^.*torch/distributed/elastic/multiprocessing/api", text, maxsplit=1, flags=re.MULTILINE)[0]
        blamed = re.findall(rf"^\[rank{rank}\]: ?(.*)", text, re.MULTILINE)
        others = re.sub(r"^\[rank\d+\]:.*", "", text, flags=re.MULTILINE)
        text = "\n".join([others, *blamed])  # others may have spoken after it
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    if code == 2 and (errors := [line for line in lines if line.startswith("error: ")]):
        return InputError(errors[-1].removeprefix("error: "))
    if code == -signal.SIGKILL:
        ended = "was killed by SIGKILL (by the kernel if memory ran out)"
    elif code < 0:
        ended = f"was killed by {signal.Signals(-code).name}"
    else:
        ended = f"exited with {code}"
    return StageFailed(f"{who} {ended}: {lines[-1] if lines else 'it logged nothing'}; log: {log_path}")


def _log_text(path: Path, start: int) -> str:
    """The end of what this attempt logged."""
    with path.open("rb") as file:
        file.seek(max(start, os.fstat(file.fileno()).st_size - _LOG_TAIL))
        return file.read().decode(errors="replace")


def _write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
    os.replace(partial, path)
