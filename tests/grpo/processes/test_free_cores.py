"""Cores that others leave free, from counts in the form of /proc/stat."""

from __future__ import annotations

import math
import os
import time
from types import SimpleNamespace

import pytest

from grpo.processes import free_cores
from grpo.processes.free_cores import FreeCores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of four cores, of which this process may use 0 to 2, on a clock of its own. One tick is 10 ms."""
    state = SimpleNamespace(clock=100.0, busy=[0, 0, 0, 0], own=0.0, stat=tmp_path / "stat")

    def advance(seconds: float, others: float, own: float, elsewhere: float = 0.0) -> None:
        state.clock += seconds
        state.own += own * seconds
        state.busy[0] += round(100 * seconds * (others + own))
        state.busy[3] += round(100 * seconds * elsewhere)
        lines = [f"cpu{core} {busy} 0 0 900 50 0 0 0 7 7" for core, busy in enumerate(state.busy)]
        state.stat.write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 5 5", "ctxt 9"]) + "\n")

    advance(0, 0, 0)
    state.advance = advance
    monkeypatch.setattr(free_cores, "STAT", state.stat)
    monkeypatch.setattr(free_cores, "CGROUP", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(os, "times", lambda: SimpleNamespace(user=state.own * 0.75, system=state.own * 0.25))
    monkeypatch.setattr(time, "monotonic", lambda: state.clock)
    return state


def test_a_quiet_machine_leaves_every_core(machine) -> None:
    cores = FreeCores()
    machine.advance(1.0, others=0.3, own=2.7)
    assert cores.count() == 3


@pytest.mark.parametrize(("others", "free"), [(0.5, 2), (0.67, 2), (1.3, 2), (1.5, 1), (2.9, 1), (9.0, 1)])
def test_what_others_take_is_not_free(machine, others, free) -> None:
    cores = FreeCores()
    machine.advance(2.0, others=others, own=0.9)
    assert cores.count() == free


def test_cores_that_this_process_may_not_use_do_not_count(machine) -> None:
    cores = FreeCores()
    machine.advance(1.0, others=0.0, own=1.0, elsewhere=1.0)
    assert cores.count() == 3


def test_the_answer_stays_between_two_looks(machine) -> None:
    cores = FreeCores()
    machine.advance(1.0, others=2.0, own=0.5)
    assert cores.count() == 1
    machine.advance(0.2, others=0.0, own=0.5)
    assert cores.count() == 1
    machine.advance(0.1, others=0.0, own=0.5)
    assert cores.count() == 3


@pytest.mark.parametrize(("limit", "free"), [("max 100000", 3), ("200000 100000", 2), ("50000 100000", 1), ("what", 3)])
def test_the_quota_of_the_control_group_is_a_limit(machine, tmp_path, limit, free) -> None:
    (tmp_path / "cpu.max").write_text(limit + "\n")
    assert FreeCores().count() == free


def test_without_proc_every_core_counts_as_free(machine) -> None:
    machine.stat.unlink()
    cores = FreeCores()
    machine.clock += 5
    assert cores.count() == 3
    assert free_cores._quota() == math.inf
