"""The supervisor of a sandboxed run.

It stays outside the namespaces with our privileges. It checks limits that no rlimit covers and collects the output. At
the end it kills every descendant and removes the folder, even if the process that requested the run was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import time
from typing import Any, NoReturn

from grpo.processes.lifetime import LINUX, Alarm, adopt_orphans, descendants, die_with_parent, end_descendants
from grpo.sandbox import namespaces, scratch_dir
from grpo.sandbox.launch import TICK_S, Launch, write

_LAST_WORDS = {
    "MemoryError": "memory",
    "OSError: [Errno 12]": "memory",
    "OSError: [Errno 27]": "disk",
    "OSError: [Errno 28]": "disk",
    "BlockingIOError: [Errno 11]": "processes",
    "RuntimeError: can't start new thread": "processes",
}
"""Last output lines of a Python program that hit a limit and did not catch the exception."""


def main() -> NoReturn:
    """Runs one program. ``argv``: the process id of the caller. Standard input: a length and the order as JSON; end of
    input means stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    alarm = Alarm()
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    adopt_orphans()
    order = json.loads(_read(int.from_bytes(_read(8), "big")))
    try:
        try:
            result = _Run(order, alarm).result()
        finally:
            end_descendants(0)
            if order["folder"] and os.path.isdir(order["folder"]):
                scratch_dir.remove(order["folder"])
    except Exception as error:  # the program did not cause this, and must not be blamed for it
        result = {"kind": "failed", "stdout": "", "stderr": f"{type(error).__name__}: {error}"}
    if result is not None:
        with contextlib.suppress(OSError):  # the caller is gone
            write(1, json.dumps(result).encode())
    os._exit(0)


class _Run:
    """The supervisor's view of one run."""

    def __init__(self, order: dict[str, Any], alarm: Alarm):
        self.order, self.limits, self.folder = order, order["limits"], order["folder"]
        self.namespaces = order["means"]["namespaces"]
        user = namespaces.unused_user() if os.geteuid() == 0 else None
        if self.folder:
            os.mkdir(self.folder, 0o700)
            if user is not None:
                os.chown(self.folder, user, user)
        pipes = {name: os.pipe() for name in ("stdout", "stderr", "report", "alive")}
        source = _source(order["stdin"].encode(errors="replace"))
        supervisor = os.getpid()
        counted = self._tasks_counted_already()
        self.child = os.fork()
        if self.child == 0:
            alarm.discard()
            os.close(pipes["alive"][1])
            ends = {"alive": pipes["alive"][0], "stdin": source}
            ends |= {name: pipes[name][1] for name in ("stdout", "stderr", "report")}
            Launch(order, supervisor, user, counted, ends).go()
        if LINUX:
            namespaces.hide_memory()
        self.taken = {name: bytearray() for name in ("stdout", "stderr", "report")}
        self.sources = {pipes[name][0]: name for name in self.taken}
        self.alarm, self.poller = alarm, alarm.poller()
        self.poller.register(sys.stdin.fileno(), select.POLLIN)
        for name in self.taken:
            os.close(pipes[name][1])
            os.set_blocking(pipes[name][0], False)
            self.poller.register(pipes[name][0], select.POLLIN)
        self.ended: dict[str, Any] = {}

    def result(self) -> dict[str, str] | None:
        """Kind and output; None if the caller is gone."""
        kind = self._watch()
        end_descendants(0)
        for descriptor in list(self.sources):
            self._take(descriptor)
        if kind == "stopped":
            return None
        most = self.limits["output_bytes"]
        text = {name: bytes(self.taken[name][:most]).decode(errors="replace") for name in ("stdout", "stderr")}
        if self.taken["report"]:
            self.ended = json.loads(self.taken["report"].splitlines()[0])  # the failing process comes first
        if "failed" in self.ended:
            return {"kind": "failed", "stdout": "", "stderr": self.ended["failed"]}
        if not kind and self._output() > most:
            kind = "output"
        return {"kind": kind or self._told_by_its_end(text["stderr"]), **text}

    def _watch(self) -> str:
        """Waits for the end of the run. Returns the limit that was broken before it, "stopped", or ""."""
        deadline = time.monotonic() + self.limits["wall_s"]
        look = time.monotonic() + TICK_S
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if now >= look:
                if kind := self._overstepped():
                    return kind
                spent = time.monotonic() - now
                look = now + max(TICK_S, 10 * spent)  # scanning many processes takes time: then wait longer
            ready = {fd for fd, _ in self.poller.poll(max(1.0, 1000 * (min(deadline, look) - now)))}
            self.alarm.reset()
            if self.alarm.terminated or sys.stdin.fileno() in ready:
                return "stopped"
            for descriptor in ready & self.sources.keys():
                self._take(descriptor)
            if self._output() > self.limits["output_bytes"]:
                return "output"
            pid, status, usage = os.wait4(self.child, os.WNOHANG)
            if pid:
                if not self.namespaces:
                    self.ended = {"status": status, "cpu_s": usage.ru_utime + usage.ru_stime}
                return ""

    def _take(self, descriptor: int) -> None:
        """Reads available output. Beyond the limit it keeps only enough to show that the limit was exceeded."""
        name = self.sources[descriptor]
        with contextlib.suppress(BlockingIOError):
            while name == "report" or self._output() <= self.limits["output_bytes"]:
                data = os.read(descriptor, 65536)
                if not data:
                    self.poller.unregister(descriptor)
                    del self.sources[descriptor]
                    return
                self.taken[name] += data

    def _output(self) -> int:
        return len(self.taken["stdout"]) + len(self.taken["stderr"])

    def _overstepped(self) -> str:
        tasks = memory = 0
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                tasks += len(os.listdir(f"/proc/{pid}/task"))
                memory += _memory(pid)
        if self.namespaces:
            memory += _socket_memory(self.child)
        if tasks - 2 * self.namespaces > self.limits["processes"]:
            return "processes"
        if memory > self.limits["memory_bytes"]:
            return "memory"
        return "disk" if self.folder and scratch_dir.size(self.folder) > self.limits["disk_bytes"] else ""

    def _told_by_its_end(self, stderr: str) -> str:
        if not self.ended:
            return "crash"  # the namespace's init was killed from within
        code = os.waitstatus_to_exitcode(self.ended["status"])
        if code == 0:
            return "ok"
        # The kernel sends SIGXCPU, and SIGKILL a second later to a program that ignores it.
        if code == -signal.SIGXCPU or (code == -signal.SIGKILL and self.ended["cpu_s"] >= self.limits["cpu_s"]):
            return "timeout"
        if code == -signal.SIGXFSZ or self.ended.get("full"):
            return "disk"
        if code < 0:
            return "crash"
        # Several processes may hit the same limit and mix their last lines.
        last = [line for line in stderr.splitlines() if line.startswith(tuple(_LAST_WORDS))][-1:]
        return next((kind for line in last for words, kind in _LAST_WORDS.items() if line.startswith(words)), "error")

    def _tasks_counted_already(self) -> int:
        """Number of tasks that the kernel counts for the program's user before the program starts."""
        ours = 3 if self.namespaces else 0
        release = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in os.uname().release.split(".")[:2])
        if os.geteuid() == 0 or (self.namespaces and release >= (5, 14)):  # since then the kernel counts per namespace
            return ours
        count = 0
        for name in os.listdir("/proc") if LINUX else ():
            with contextlib.suppress(OSError):
                if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.geteuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
        return ours + count


def _memory(pid: int) -> int:
    """Bytes that a process holds: its own pages and its proportional part of shared pages, without file pages."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            fields = dict(line.split()[:2] for line in file.readlines()[1:])
        return 1024 * sum(int(fields[name]) for name in ("Pss_Anon:", "Pss_Shmem:"))
    except (PermissionError, FileNotFoundError, KeyError):  # hidden process, or kernel before 5.4
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split()[:2] for line in file if line.startswith(("RssAnon:", "RssShmem:")))
        return 1024 * sum(map(int, fields.values()))


def _socket_memory(pid: int) -> int:
    """The most bytes that data in the local sockets of a process's network namespace can take, sockets that only a
    message refers to included: for each, the send buffer and one more message of half its size (unix(7))."""
    names = f"/proc/{pid}/net/unix", "/proc/sys/net/core/wmem_default"
    with contextlib.suppress(OSError), open(names[0]) as sockets, open(names[1]) as buffer:
        return (sum(1 for _ in sockets) - 1) * int(buffer.read()) * 3 // 2
    return 0  # it has ended meanwhile, or /proc does not show it


def _read(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(1)  # the caller is gone
        data += piece
    return bytes(data)


def _source(data: bytes) -> int:
    """A file descriptor from which a program can read `data`; the program need not read it."""
    if not LINUX:
        return _file_with(data)
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def _file_with(data: bytes) -> int:
    import tempfile

    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        return os.dup(file.fileno())
