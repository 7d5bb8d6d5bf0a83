"""Processes of a try: found by the home in their environment or by descent, and named by what they do."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from grpo.processes.lifetime import descendants

GONE = ("", "Z", "X")
"""States of processes that have ended."""
NOT_OURS: set[int] = set()
"""Processes of the suite that have the home in their environment."""


def command_line(pid: int) -> str:
    """The arguments of a process, "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    """Process id of the parent, 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def members(home: Path) -> set[int]:
    """Live processes with this home in their environment, and all below them."""
    mark = f"R1FLOW_HOME={home}".encode()
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0") and int(path.name) not in NOT_OURS:
                found.add(int(path.name))
    for pid in [*found]:
        found |= descendants(pid)
    found -= {os.getpid()}
    return {pid for pid in found if state_of(pid) not in GONE}


def state_of(pid: int) -> str:
    """The letter of /proc/PID/stat, "" if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def ignores(pid: int, number: signal.Signals) -> bool:
    """Whether a process ignores a signal; True if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def role_of(pid: int) -> str:
    """What a process of `r1 run` does: flow, prefect, fork_server, trainer, rank or reward_worker."""
    line = command_line(pid)
    if "pool_worker" in line:
        return "reward_worker"
    if "prefect.server" in line or "flows.prefect_server" in line:
        return "prefect"
    if "grpo.fork_server" in line:
        return "trainer" if "grpo.fork_server" in command_line(parent_of(pid)) else "fork_server"
    if "grpo.train" in line:
        return "rank" if "grpo.train" in command_line(parent_of(pid)) else "trainer"
    return "flow" if "flows.cli" in line or "chaos.zygote" in line else "other"


def with_role(home: Path, role: str) -> list[int]:
    """Processes of a role in the home, in the order of their ids."""
    return sorted(pid for pid in members(home) if role_of(pid) == role)


def end_all(home: Path) -> None:
    """Kill every process of the home."""
    while alive := members(home):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def leftovers(home: Path, seconds: float) -> list[str]:
    """Roles of processes that are still there after so many seconds."""
    deadline = time.monotonic() + seconds
    while (alive := members(home)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [role_of(pid) for pid in sorted(alive)]
