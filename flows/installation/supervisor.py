"""Keeps long-running processes alive, and ends all their descendants when it ends.

It adopts orphans and ends them: whatever a dead service leaves behind (a flow of a killed worker, a child of a killed
server) would hold a GPU or a port that the next one needs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tasks.trainer.processes import adopt_orphans, descendants, die_with_parent, end_descendants, process_name

POLL_S = 0.5
BACKOFF_S = (1.0, 2.0, 5.0, 15.0, 60.0)
CALM_S = 120.0
"""A service that ran for at least this many seconds is restarted without delay."""
GRACE_S = 45.0
"""Seconds between SIGTERM and SIGKILL for a service and its descendants, because a flow stops its trainer, which then
writes a checkpoint."""

LOG_BYTES = 16 * 2**20
"""Size in bytes from which a log is moved to `<name>.log.1`, replacing the previous one."""
LOGS_S = 60.0
"""Seconds between two checks of log sizes."""


@dataclass
class Service:
    """A process to keep alive. It logs to `<logs>/<name>.log`."""

    name: str
    command: Sequence[str]
    settings: Mapping[str, str] = field(default_factory=dict)
    signal: int = signal.SIGTERM
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    deaths: int = 0
    due: float | None = None  # when to restart it, if it is down

    def start(self, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        ours = os.getpid()
        with (logs / f"{self.name}.log").open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.settings},
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(ours, self.signal),
            )
        self.began = time.monotonic()

    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Starts services in order and restarts those that die, until it is told to stop.

    Calls `changed` whenever a service has a new process. Runs in the main thread, which receives signals.
    """

    def __init__(self, logs: Path, changed: Callable[[], None] = lambda: None):
        self.services: list[Service] = []
        self._logs = logs
        self._changed = changed
        self.stopping = False
        self._looked = 0.0
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def start(self, service: Service) -> None:
        service.start(self._logs)
        self.services.append(service)
        self._changed()

    def processes(self) -> dict[str, str | None]:
        """Service -> the unique name of its process."""
        return {
            service.name: process_name(service.process.pid) if service.process else None for service in self.services
        }

    def watch(self) -> None:
        """Restarts dead services and ends orphans until a signal arrives."""
        while not self.stopping:
            self._end_orphans()
            for service in self.services:
                if not service.is_alive():
                    self._revive(service)
            if time.monotonic() - self._looked > LOGS_S:
                self._looked = time.monotonic()
                put_aside_large_logs(self._logs)
            time.sleep(POLL_S)

    def _revive(self, service: Service) -> None:
        if service.due is None:
            lived = time.monotonic() - service.began
            wait = 0.0 if lived > CALM_S else BACKOFF_S[min(service.deaths, len(BACKOFF_S) - 1)]
            service.deaths = 0 if lived > CALM_S else service.deaths + 1
            service.due = time.monotonic() + wait
            code = service.process.returncode if service.process else None
            said = f"{service.name} ended with {code} after {lived:.0f} s; starting it again in {wait:g} s"
            with contextlib.suppress(OSError):  # a full disk must not end the other services, here and below
                print(said, flush=True)
        elif time.monotonic() >= service.due:
            self._end_orphans()
            service.due = time.monotonic() + BACKOFF_S[-1]  # if it cannot be started now
            with contextlib.suppress(OSError):
                service.start(self._logs)
                service.due = None
                self._changed()

    def _end_orphans(self) -> None:
        """Ends the orphans of dead services. Each gets time to clean up."""
        deadline = time.monotonic() + GRACE_S
        told: set[int] = set()
        while orphans := self._orphans():
            for pid in orphans - told:
                _signal(pid, signal.SIGTERM)
            told |= orphans
            if time.monotonic() > deadline:
                for pid in orphans | set().union(*(descendants(pid) for pid in orphans)):
                    _signal(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _orphans(self) -> set[int]:
        """Live child processes that are not services. Also reaps dead ones."""
        services = {service.process.pid for service in self.services if service.process}
        pids = set()
        for pid in children(os.getpid()) - services:
            if process_name(pid) is not None:
                pids.add(pid)
            else:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return pids

    def stop(self, *names: str) -> None:
        """Stops these services at once, or all of them, one after the other in reverse order. Returns when they and
        their descendants are gone."""
        if not names:
            for service in self.services[::-1]:
                self.stop(service.name)
            end_descendants(0)
            return
        chosen = [(service, service.process) for service in self.services if service.process and service.name in names]
        families = {}
        for service, process in chosen:
            families[process.pid] = descendants(process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(service.signal)
        deadline = time.monotonic() + GRACE_S
        for service, process in chosen:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                for pid in {process.pid, *families[process.pid], *descendants(process.pid)}:
                    _signal(pid, signal.SIGKILL)
                process.wait()
            self.services.remove(service)
        self._end_orphans()


def put_aside_large_logs(logs: Path) -> None:
    """Copies and then empties logs that have grown large, because their processes keep them open for appending."""
    for log in logs.glob("*.log"):
        with contextlib.suppress(OSError):  # the disk may be full: the next check tries again
            if log.stat().st_size > LOG_BYTES:
                shutil.copyfile(log, log.with_suffix(".log.partial"))
                log.with_suffix(".log.partial").replace(log.with_suffix(".log.1"))
                os.truncate(log, 0)


def children(pid: int) -> set[int]:
    """Direct children of a process, from /proc; empty if there is no /proc."""
    pids: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids |= {int(child) for child in path.read_text().split()}
    return pids


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def tail(path: Path) -> str:
    """The last line of a log, for a message."""
    try:
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return lines[-1][:300] if lines else "it logged nothing"


PYTHON = (sys.executable, "-m")
