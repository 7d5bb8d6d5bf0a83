"""Launches a trainer as a subprocess, watches it, and stops it when the flow stops."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo.config.common import Hardware
from grpo.errors import InputError
from grpo.processes.metrics_log import COMPLETIONS
from grpo.processes.notices import PREFIX
from tasks.trainer import fork_client
from tasks.trainer.interpreter import trainer_python
from tasks.trainer.outcome import StageFailed, read_result
from tasks.trainer.process_group import command, run_watched, trainer_environment
from tasks.trainer.rendezvous import ENDPOINT, RANK, Rendezvous

logger = logging.getLogger(__name__)

JOB = "job.json"
"""File in the work folder with the job."""
LOG = "trainer.log"
"""File in the work folder with the trainer's stdout and stderr."""
__all__ = ["COMPLETIONS", "JOB", "LOG", "hardware_of", "launch", "preload", "read_metrics"]


def preload() -> None:
    """If trainers may be forks, starts loading in the background what the next trainer needs."""
    if trainer_python() == sys.executable:
        fork_client.preload(trainer_environment({}, "", Hardware()))


def launch(
    job: dict[str, Any],
    work: Path,
    *,
    on_metrics: Callable[[list[dict[str, Any]]], None],
    on_completions: Callable[[list[dict[str, Any]], bool], None] = lambda rows, anew: None,
    rendezvous: Rendezvous | None = None,
    time_limit_s: float | None = None,
    lock_fd: int | None = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs the training job in the processes that its hardware settings ask for. Returns the trainer's result.json.

    `on_metrics` receives each new record of metrics.jsonl, `on_completions` each one of completions.jsonl. A trainer
    that goes back to a checkpoint drops later records: then all that are left come again, and the second argument of
    `on_completions` is true. `work` is the folder for the job file, log and result. A job for several machines calls
    the others through `rendezvous`. If anything ends this call early (an exception, Ctrl-C, a cancellation, the time
    limit), every process of the trainer is stopped first.

    Raises:
        InputError: the trainer refused its input (exit code 2); the message is the trainer's.
        StageFailed: it crashed, ran longer than `time_limit_s` seconds, or finished fewer steps than planned.
    """
    hardware = hardware_of(job)
    processes, nodes = hardware.processes, hardware.nodes
    work.mkdir(parents=True, exist_ok=True)
    job_path, log_path, result_path = work / JOB, work / LOG, work / "result.json"
    _write(job_path, job)
    result_path.unlink(missing_ok=True)  # a result of an earlier attempt proves nothing about this one
    metrics, completions = _MetricsTail(work / "metrics.jsonl"), _MetricsTail(work / COMPLETIONS)
    log_start = log_path.stat().st_size if log_path.exists() else 0
    notices = _NoticesTail(log_path, log_start)
    mark = uuid.uuid4().hex
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s

    def hand_on() -> None:
        if records := metrics.read():
            on_metrics(records)
        if (rows := completions.read()) or completions.anew:
            on_completions(rows, completions.anew)

    def poll() -> None:
        hand_on()
        notices.hand_on()
        if deadline is not None and time.monotonic() > deadline:
            raise StageFailed(f"the trainer ran past its limit of {time_limit_s:g} s and was stopped; log: {log_path}")

    with _announced(rendezvous, job_path, nodes) as extra:
        environment = trainer_environment({**(env or {}), **extra}, mark, hardware)
        try:
            code = run_watched(command(job_path, processes, nodes), log_path, environment, mark, poll, lock_fd)
        except BaseException:
            # Records written between SIGTERM and exit: the next attempt starts reading after them.
            with contextlib.suppress(Exception):
                hand_on()
            raise
    hand_on()
    notices.hand_on()
    return read_result(code, processes * nodes, result_path, log_path, log_start)


def hardware_of(job: Mapping[str, Any]) -> Hardware:
    """The hardware settings of a job, from plain JSON."""
    return Hardware.model_validate(job.get("hardware") or (job.get("settings") or {}).get("hardware") or {})


@contextlib.contextmanager
def _announced(rendezvous: Rendezvous | None, job_path: Path, nodes: int) -> Iterator[dict[str, str]]:
    if nodes == 1:
        yield {}
    elif rendezvous is None:
        raise InputError(
            f"hardware.nodes is {nodes}, but nothing says where the machines meet: set {ENDPOINT} to HOST:PORT of the "
            f"first one, the same on all, and {RANK} to 0 there and to 1, 2, ... on the others"
        )
    else:
        with rendezvous.announce(job_path) as extra:
            yield extra


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl so far. Lines that are not valid records are skipped."""
    tail = _MetricsTail(path)
    tail.rewind()
    return tail.read()


class _MetricsTail:
    """Reads records that are appended to a JSON-lines file from now on; complete lines only. `anew`: whether the last
    read began again at the first record, because a trainer that went back to a checkpoint replaced the file."""

    def __init__(self, path: Path):
        self._path = path
        status = path.stat() if path.exists() else None
        self._offset, self._inode = (status.st_size, status.st_ino) if status else (0, 0)
        self.anew = False
        self._warned = False

    def rewind(self) -> None:
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        self.anew = False
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                # Its new file may have grown beyond the old one by now.
                self.anew = self._offset > 0 and (status.st_size < self._offset or status.st_ino != self._inode)
                self._offset, self._inode = 0 if self.anew else self._offset, status.st_ino
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
        except (ValueError, KeyError, RecursionError):
            pass
        if line.strip() and not self._warned:
            logger.warning("%s: skipping a line that is no record with a step: %r", self._path, line[:200])
            self._warned = True
        return None


class _NoticesTail:
    """Forwards a trainer's notices (`grpo.processes.notices`) from its log, starting at byte `start`."""

    def __init__(self, log: Path, start: int):
        self._log, self._offset = log, start

    def hand_on(self) -> None:
        """Logs each new notice once its line is complete."""
        with self._log.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole + newline)
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith(PREFIX):
                logger.warning("%s", line.removeprefix(PREFIX))


def _write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
    os.replace(partial, path)
