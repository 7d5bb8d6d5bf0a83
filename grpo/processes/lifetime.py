"""Process lifetimes: processes that die with their parent, and parents that end all their descendants.

Outside Linux there is neither /proc nor prctl; then only a process group can be killed.
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
ENDS_WITH_PARENT = "R1FLOW_ENDS_WITH_PARENT"
"""Variable for processes that a library spawns from the program of `grpo.train`: they die with their parent."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Linux's prctl(2) with one argument. Raises OSError if the kernel refuses it."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Makes the kernel send signal `number` to this process when the parent's thread that started it ends (Linux only).

    `parent` is the parent's process id; if the parent is already gone, this process exits. A change of user undoes
    the setting, so call this after such a change.
    """
    if LINUX:
        prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent was gone before the kernel was told
        os._exit(1)


def be_killed_first(points: int) -> None:
    """When memory runs out, has the kernel kill this process and those that it starts before others, as if it held
    `points` thousandths of the memory more (Linux only)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(points))


def write_whole_lines() -> None:
    """Makes stdout and stderr write whole lines, so that processes that share a log do not mix their output."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


def process_name(pid: int) -> str | None:
    """A unique name for the process on this host (process ids are reused); None if the process is gone."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else f"{pid} {fields[18]} {boot}"  # field 22 of stat: start time in clock ticks
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    import subprocess

    started = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return f"{pid} {started}" if started else None


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends, including those in another session."""
    if LINUX:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> set[int]:
    """Process ids of all descendants of `pid`, from /proc; empty where there is no /proc."""
    children_of: dict[int, list[int]] = {}
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return set()
    for name in names:
        with contextlib.suppress(OSError):  # it has ended
            # The command's name is in parentheses and may contain anything, so count the fields after it.
            state, parent = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                children_of.setdefault(int(parent), []).append(int(name))
    below: set[int] = set()
    front = [pid]
    while front:
        children = [c for p in front for c in children_of.get(p, ()) if c not in below]
        below.update(children)
        front = children
    return below


def end_descendants(grace_s: float) -> None:
    """Sends SIGTERM to all descendants and kills those left after `grace_s` seconds; with 0, kills them immediately.

    Needs `adopt_orphans`. Stops all descendants before killing any, so that a fork bomb cannot create new processes
    faster than they are killed.
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
    """Collects children that have ended; returns whether any are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or changed its user
            os.kill(pid, number)


class Alarm:
    """Wakes a poll(2) when a child ends or SIGTERM arrives. Create it in the main thread, before starting the child."""

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

    def discard(self) -> None:
        """Removes the alarm in a forked child, which must not share it with its parent."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)

    def poller(self) -> select.poll:
        """A poll object that this alarm wakes; the caller may register more descriptors with it."""
        poller = select.poll()
        poller.register(self._read, select.POLLIN)
        return poller

    def reset(self) -> None:
        """Clears the alarm after it has woken a poll."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 512):
                pass
