"""What killable processes need of the system: to die with their parent, and to take all their descendants along.

Where the kernel is not Linux there is no /proc and no prctl: then a process group is all that can be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Linux's prctl(2) with one argument; OSError where the kernel refuses it."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Signal `number` comes when the thread of process `parent` that started this process ends (Linux only).

    A change of user undoes it: call it afterwards.
    """
    if LINUX:
        prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent was gone before the kernel was told
        os._exit(1)


def write_whole_lines() -> None:
    """What this process says reaches a log that others write to as well a line at a time, not a word at a time."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


def process_name(pid: int) -> str | None:
    """A name for the process that no other one ever gets on this host, None if it is gone: ids are used again."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else f"{pid} {fields[18]} {boot}"  # field 22 of stat: the start in clock ticks
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    import subprocess

    started = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return f"{pid} {started}" if started else None


def adopt_orphans() -> None:
    """Descendants whose parent ends become our children, even those that started a session of their own."""
    if LINUX:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> set[int]:
    """Process ids of everything below `pid`, as /proc says; empty where there is no /proc."""
    parents: dict[int, list[int]] = {}
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return set()
    for name in names:
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The command's name stands in parentheses and may hold anything, so the fields are counted from behind it.
            state, parent = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                parents.setdefault(int(parent), []).append(int(name))
    found: set[int] = set()
    front = [pid]
    while front:
        children = [c for p in front for c in parents.get(p, ()) if c not in found]
        found.update(children)
        front = children
    return found


def end_descendants(grace_s: float) -> None:
    """Asks all our descendants to end, and after `grace_s` seconds, or at once if it is 0, kills what is left.

    Needs `adopt_orphans`. All are stopped before any is killed: a fork bomb cannot outrun a killer whose victims
    keep their places in the process table until none of them can fork.
    """
    deadline = time.monotonic() + grace_s
    if grace_s:
        _signal(descendants(os.getpid()), signal.SIGTERM)
    while reap() and time.monotonic() < deadline:
        time.sleep(0.002)
    while reap():
        stopped: set[int] = set()
        while fresh := descendants(os.getpid()) - stopped:
            _signal(fresh, signal.SIGSTOP)
            stopped |= fresh
        _signal(stopped, signal.SIGKILL)
        if not stopped and not LINUX:
            return
        time.sleep(0.001)


def reap() -> bool:
    """Collects children that ended; whether any is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended meanwhile, or changed its user
            os.kill(pid, number)


class Alarm:
    """Wakes a poll(2) when a child ends or a SIGTERM comes. Made in the main thread, before the child is started."""

    def __init__(self) -> None:
        self.terminated = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, *_: object) -> None:
        self.terminated = True

    def forget(self) -> None:
        """For the child after a fork: the parent's alarm is not its own."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)

    def poller(self) -> select.poll:
        """A poll object that this alarm wakes; the caller registers more with it."""
        poller = select.poll()
        poller.register(self._read, select.POLLIN)
        return poller

    def quiet(self) -> None:
        """Forgets what woke it."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 512):
                pass
