"""Measures how many cores of this machine other processes leave free."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
CGROUP = Path("/sys/fs/cgroup/cpu.max")
INTERVAL_S = 0.25
"""Minimum time between two measurements. The kernel counts in hundredths of a second."""
_ROUND_UP = 0.4
"""A core counts as taken once other processes use more than 1 - this of it in total: a busy process that shares two
cores with two busy threads gets only 2/3 of one."""


class FreeCores:
    """Measures the use of the cores since the last measurement. Linux only; elsewhere all cores count as free."""

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        self._limit = min(float(len(self._cores)), _quota())
        self._ticks = float(os.sysconf("SC_CLK_TCK"))
        self._last = self._read()
        self._free = self._whole(0.0)

    def count(self) -> int:
        """Number of cores that are free for this process, at least 1, measured over at least the last INTERVAL_S."""
        if time.monotonic() - self._last[0] >= INTERVAL_S:
            before, self._last = self._last, self._read()
            elapsed, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
            self._free = self._whole(max(0.0, busy - own) / elapsed)
        return self._free

    def _whole(self, taken: float) -> int:
        return max(1, math.floor(self._limit - taken + _ROUND_UP))

    def _read(self) -> tuple[float, float, float]:
        """In seconds: the clock, the CPU time of all processes on these cores, and the CPU time of this process."""
        usage = os.times()
        return time.monotonic(), self._busy(), usage.user + usage.system

    def _busy(self) -> float:
        try:
            lines = STAT.read_text().splitlines()
        except OSError:
            return 0.0
        busy = 0
        for line in lines:
            name, *counts = line.split()
            if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in self._cores:
                user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, counts[:8])
                busy += user + nice + system + irq + softirq + steal
        return busy / self._ticks


def _quota() -> float:
    """Number of cores that the control group may use at once; infinity without a limit."""
    try:
        quota, period = CGROUP.read_text().split()
        return math.inf if quota == "max" else max(1.0, int(quota) / int(period))
    except (OSError, ValueError):
        return math.inf
