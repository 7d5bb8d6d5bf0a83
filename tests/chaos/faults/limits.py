"""Memory, files and file sizes that run out."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.chaos.faults.kills import send
from tests.chaos.faults.registry import fault
from tests.chaos.processes import members
from tests.chaos.trial import Command, Ended, Trial

DATA, SFT, RL = "cold_start_data", "cold_start_sft", "reasoning_rl"
MEMORY = Path("/sys/fs/cgroup/memory")
PAGE = resource.getpagesize()
SAYS = re.compile("out of memory|cannot allocate memory|too many open files|file too large", re.IGNORECASE)
"""How programs call a limit that they met."""


def in_trainer(trial: Trial, limit: Callable[[Trial, int], object]) -> Ended:
    """Apply a limit to a trainer at a seeded moment. It struck if the command failed, or said so: the kernel does not
    tell who met a limit."""
    with trial.running() as command:
        pid = trial.find(command, "trainer")
        if pid is not None:
            trial.moment(command, 4.0)
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                limit(trial, pid)
    if SAYS.search(command.wait().said):
        trial.struck = True
    return command.wait()


def address_space(trial: Trial, pid: int) -> None:
    """A few MB more than it uses, at most 60."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    spare = trial.chance.randrange(60_000_000)
    trial.notes.append(f"{spare} bytes more")
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * PAGE + spare, pages * PAGE + spare))


def descriptors(trial: Trial, pid: int) -> None:
    """None more, or a few."""
    count = len(os.listdir(f"/proc/{pid}/fd")) + trial.chance.randrange(4)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, count))


def file_size(trial: Trial, pid: int) -> None:
    """Files of the trainer end somewhere in the first 600 kB."""
    size = trial.chance.randrange(600_000)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))


fault("memory of the trainer runs out (RLIMIT_AS)", SFT, RL)(partial(in_trainer, limit=address_space))
fault("file descriptors of the trainer run out", SFT, RL)(partial(in_trainer, limit=descriptors))
fault("files of the trainer may not grow (RLIMIT_FSIZE)", SFT, RL)(partial(in_trainer, limit=file_size))


def start_with(trial: Trial, *limits: str) -> Ended:
    """The whole command below a limit of prlimit(1)."""
    trial.prefix = ["prlimit", *limits]
    return trial.whole()


@fault("few file descriptors for everything", DATA, SFT, needs=("prlimit",), own_server=True)
def few_descriptors(trial: Trial) -> Ended:
    return start_with(trial, f"--nofile={trial.chance.randrange(10, 240)}")


@fault("little memory for everything (RLIMIT_DATA)", DATA, SFT, needs=("prlimit",), own_server=True)
def little_memory(trial: Trial) -> Ended:
    return start_with(trial, f"--data={trial.chance.randrange(100_000_000, 900_000_000)}")


def _kill(trial: Trial, pid: int) -> None:
    trial.struck = send(signal.SIGKILL, pid)


def _killed(group: Path) -> bool:
    return "oom_kill 0" not in (group / "memory.oom_control").read_text()


@fault("out of memory (cgroup)", SFT, RL)
def out_of_memory(trial: Trial) -> Ended:
    """The kernel kills what is largest in a control group whose limit is near what is used at a seeded moment."""
    group = MEMORY / f"chaos-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        trial.notes.append("control groups may not be made here: SIGKILL of the trainer instead")
        return in_trainer(trial, _kill)
    trial.closing.append(group.rmdir)
    with trial.running() as command:
        if trial.find(command, "trainer") is not None:
            for pid in members(trial.homes.home):
                with contextlib.suppress(OSError):
                    (group / "cgroup.procs").write_text(str(pid))
            trial.moment(command, 4.0)
            _squeeze(group, command)
            trial.struck = _killed(group)
            trial.notes.append("the kernel killed" if trial.struck else "it fitted")
    ended = command.wait()
    # The kernel chooses; once the trainer is small or gone, the flow is the largest.
    trial.killed_flow = trial.struck is True and ended.code == -signal.SIGKILL
    return ended


def _squeeze(group: Path, command: Command) -> None:
    """Lower the limit below what cannot be reclaimed, until the kernel kills; then lift it."""
    until = time.monotonic() + 20
    (group / "memory.oom_control").read_text()
    while command.process.poll() is None and time.monotonic() < until:
        charged = int((group / "memory.usage_in_bytes").read_text())
        with contextlib.suppress(OSError):
            (group / "memory.limit_in_bytes").write_text(str(max(2**22, charged - 2**23)))
        time.sleep(0.05)
        if _killed(group):
            break
    with contextlib.suppress(OSError):
        (group / "memory.limit_in_bytes").write_text("-1")
