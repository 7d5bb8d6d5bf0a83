"""Run a command in a process of its own and measure the most memory that it and its children hold. Linux only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")
INTERVAL_S = 0.1
NEW_PEAK = 1.01
"""To read PSS takes the kernel 5 ms a GB, with the process's memory map locked: it is read only where the resident set
sizes, which cost nothing, add up to so much more than at the last reading."""


class PeakMemory:
    """Of a process tree, in MB, every page once.

    Anonymous and shared memory by proportional set size (PSS), in which a page of n processes is 1/n for each; pages of
    files (libraries) by the largest set of one process, since strangers that use the same library would lower its PSS.
    """

    def __init__(self, root: int):
        self.root = root
        self.peak_mb = 0.0
        self.resident_then = 0

    def sample(self) -> None:
        tree = process_tree(self.root)
        resident = sum(map(_resident_bytes, tree))
        if resident > NEW_PEAK * self.resident_then:
            self.resident_then = resident
            sets = list(map(_page_sets, tree))
            held = sum(own for own, _ in sets) + max((of_files for _, of_files in sets), default=0)
            self.peak_mb = max(self.peak_mb, held / 1024)


def run(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The last line of stdout that is a JSON object, with "peak_mb" of the process tree added.

    Its stdout and stderr go to `log`.out and `log`.err. Raises RuntimeError with the end of stderr where it fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    out, err = log.with_name(log.name + ".out"), log.with_name(log.name + ".err")
    with out.open("w") as stdout, err.open("w") as stderr:
        child = subprocess.Popen(command, stdout=stdout, stderr=stderr, env={**os.environ, **(environment or {})})
        try:
            memory = PeakMemory(child.pid)
            while child.poll() is None:
                memory.sample()
                time.sleep(INTERVAL_S)
        except BaseException:
            for pid in reversed(process_tree(child.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} failed ({child.returncode}):\n" + err.read_text()[-3000:])
    objects = [line for line in out.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
    return json.loads(objects[-1]) | {"peak_mb": memory.peak_mb}


def process_tree(root: int) -> list[int]:
    """`root` and all that descends from it."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            after_name = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2]
        except OSError:  # it is gone
            continue
        children.setdefault(int(after_name.split()[1]), []).append(int(name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def high_water_mb() -> float:
    """Largest resident set of this process so far (VmHWM)."""
    return _fields(Path("/proc/self/status").read_text())["VmHWM"] / 1024


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except OSError:
        return 0


def _page_sets(pid: int) -> tuple[int, int]:
    """KB of a process: its part of anonymous and shared memory, and all its pages of files."""
    try:
        rollup = _fields(Path(f"/proc/{pid}/smaps_rollup").read_text())
        status = _fields(Path(f"/proc/{pid}/status").read_text())
        return rollup["Pss_Anon"] + rollup["Pss_Shmem"], status["RssFile"]
    except (OSError, KeyError):  # it is gone, or going
        return 0, 0


def _fields(text: str) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file in /proc."""
    words = [line.split() for line in text.splitlines()]
    return {line[0].rstrip(":"): int(line[1]) for line in words if len(line) == 3 and line[2] == "kB"}
