"""Starting a sandboxed program: from the supervisor's fork through namespaces and limits to exec."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
from typing import Any, NoReturn

from grpo.processes.lifetime import LINUX, Alarm, be_killed_first, die_with_parent, prctl
from grpo.sandbox import namespaces, system_calls

TICK_S = 0.05
"""Seconds between two checks of limits that no rlimit covers."""
_PR_SET_NO_NEW_PRIVS = 38
_OPEN_FILES = 128
_SPARE_TASKS = 8
"""Margin between the number of tasks at which the supervisor ends a run and the limit that the kernel enforces."""


class Launch:
    """The steps from the fork to the program. Its public methods do not return."""

    def __init__(
        self, order: dict[str, Any], supervisor: int, user: int | None, counted: int, ends: dict[str, int]
    ) -> None:
        self.order, self.supervisor, self.user, self.counted, self.ends = order, supervisor, user, counted, ends
        self.means = order["means"]

    def go(self) -> NoReturn:
        try:
            die_with_parent(self.supervisor)
            if self.means["namespaces"]:
                self._enter()
            self._program()
        except BaseException as error:
            write(self.ends["report"], json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        os._exit(1)

    def _enter(self) -> NoReturn:
        if self.means["own_user"] and self.user is not None:
            namespaces.become(self.user)
            self.user = None
        namespaces.unshare(self.means["own_user"], self.means["own_files"])
        die_with_parent(self.supervisor)  # a change of privileges undoes it
        if os.fork() == 0:
            self._init()
        os.wait()
        os._exit(0)

    def _init(self) -> NoReturn:
        """Runs the init process of the namespace: when it ends, everything in the namespace ends."""
        die_with_parent(0)  # a parent outside the namespace has no process id in it
        alarm = Alarm()
        poller = alarm.poller()
        poller.register(self.ends["alive"], 0)
        if poller.poll(0):
            os._exit(1)  # the supervisor was gone before prctl took effect
        if self.means["own_files"]:
            namespaces.private_root(self.order["needed"], self.order["limits"]["disk_bytes"], self.user)
        program = os.fork()
        if program == 0:
            alarm.discard()
            self._program()
        ended: dict[str, Any] = {}
        while not ended:
            poller.poll(1000 * TICK_S)
            alarm.reset()
            full = self.means["own_files"] and namespaces.full()
            if full:
                os.kill(program, signal.SIGKILL)
            if alarm.terminated:
                os._exit(1)
            with contextlib.suppress(ChildProcessError):
                while (end := os.wait4(-1, os.WNOHANG))[0]:
                    if end[0] == program:
                        ended = {"status": end[1], "cpu_s": end[2].ru_utime + end[2].ru_stime, "full": full}
        write(self.ends["report"], json.dumps(ended).encode() + b"\n")
        os._exit(0)

    def _program(self) -> NoReturn:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        be_killed_first(1000)
        folder = self.order["folder"] or namespaces.WORK
        os.chdir(folder)
        self._limit()
        if self.user is not None:
            namespaces.become(self.user)
            if not self.means["namespaces"]:
                die_with_parent(self.supervisor)
        with open("program.py", "w", encoding="utf-8", errors="replace") as file:
            file.write(self.order["program"])
        for target, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(self.ends[name], target)
        if LINUX:
            prctl(_PR_SET_NO_NEW_PRIVS, 1)
        if self.means["filtered"]:
            system_calls.restrict()
        environment = {**self.order["environment"], "HOME": folder, "TMPDIR": folder}
        command = self.order["command"]
        os.execve(command[0], [*command, "-X", "utf8", "program.py"], environment)

    def _limit(self) -> None:
        limits = self.order["limits"]
        cpu_s = math.ceil(limits["cpu_s"])
        rlimits = {
            "RLIMIT_CPU": (cpu_s, cpu_s + 1),
            "RLIMIT_AS": (limits["memory_bytes"],) * 2,
            "RLIMIT_FSIZE": (limits["disk_bytes"],) * 2,
            "RLIMIT_NPROC": (limits["processes"] + self.counted + _SPARE_TASKS,) * 2,
            "RLIMIT_NOFILE": (_OPEN_FILES,) * 2,
            "RLIMIT_CORE": (0, 0),
            "RLIMIT_MEMLOCK": (0, 0),
            "RLIMIT_MSGQUEUE": (0, 0),
        }
        for name, (soft, hard) in rlimits.items():
            if (kind := getattr(resource, name, None)) is not None:
                ceiling = resource.getrlimit(kind)[1]
                if ceiling != resource.RLIM_INFINITY:
                    soft, hard = min(soft, ceiling), min(hard, ceiling)
                resource.setrlimit(kind, (soft, hard))


def write(descriptor: int, data: bytes) -> None:
    """Writes all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
