"""Signals to one process of a run, at a seeded moment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import partial

from tests.chaos.faults.registry import fault
from tests.chaos.processes import GONE, ignores, members, state_of, with_role
from tests.chaos.trial import Command, Ended, Trial

DATA, SFT, RL = "cold_start_data", "cold_start_sft", "reasoning_rl"
SPAN_S = {DATA: 4.0, SFT: 6.0, RL: 12.0}
"""Seconds from the start of a role to the end of a stage, on a quiet core: signals fall anywhere in it."""
STOPPED_S = 3.0
SHOWS_S = 5.0
"""A killed process is gone, a stopped one stopped, within this time."""
NOTICED_S = 60.0
"""A stopped trainer has to be reported within this time."""


def send(number: signal.Signals, *pids: int) -> bool:
    """Send a signal to processes that may have ended. Whether it struck one: it was alive, does not ignore the signal,
    and is gone after SIGKILL, stopped after SIGSTOP."""
    hit = [pid for pid in pids if state_of(pid) not in GONE and not ignores(pid, number)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    shows = {signal.SIGKILL: GONE, signal.SIGSTOP: (*GONE, "T", "t")}.get(number)
    deadline = time.monotonic() + SHOWS_S
    while shows and not all(state_of(pid) in shows for pid in hit) and time.monotonic() < deadline:
        time.sleep(0.01)
    return any(shows is None or state_of(pid) in shows for pid in hit)


def aim(trial: Trial, command: Command, role: str) -> int | None:
    """A process of the role, at a seeded moment of its life; None if the command ended before."""
    trial.struck = False  # until it does
    if (pid := trial.find(command, role)) is None:
        trial.notes.append(f"no {role} was seen")
        return None
    trial.moment(command, SPAN_S.get(trial.target, 3.0) + (6.0 if role in ("flow", "prefect") else 0.0))
    if command.process.poll() is not None:
        trial.notes.append("it ended before the fault")
        return None
    return pid


def strike(trial: Trial, role: str, number: signal.Signals) -> Ended:
    """One signal to one process."""
    if role == "rank":
        trial.more = ["--set", f"{trial.target}.hardware.processes=2"]
    with trial.running() as command:
        pid = aim(trial, command, role)
        if pid is not None:
            trial.killed_flow = role == "flow"
            trial.struck = send(number, pid)
    return command.wait()


def stop_for_a_while(trial: Trial, role: str) -> Ended:
    """SIGSTOP, and SIGCONT some seconds later."""
    with trial.running() as command:
        pid = aim(trial, command, role)
        if pid is not None:
            trial.struck = send(signal.SIGSTOP, pid)
            trial.undo.append(partial(send, signal.SIGCONT, pid))
            time.sleep(trial.chance.uniform(0.5, STOPPED_S))
            send(signal.SIGCONT, pid)
    return command.wait()


ROLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "flow": ("flow", (DATA, SFT, RL)),
    "trainer": ("trainer", (SFT, RL)),
    "reward_worker": ("reward worker", (RL,)),
    "prefect": ("own Prefect server", (DATA, SFT)),
}
for of, (called, targets) in ROLES.items():
    for sent in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        act = partial(strike, role=of, number=sent)
        fault(f"{sent.name} of the {called}", *targets, own_server=of == "prefect")(act)
    act = partial(stop_for_a_while, role=of)
    fault(f"SIGSTOP and SIGCONT of the {called}", *targets, own_server=of == "prefect")(act)
fault("SIGKILL of a rank", RL)(partial(strike, role="rank", number=signal.SIGKILL))
fault("SIGTERM of a rank", RL)(partial(strike, role="rank", number=signal.SIGTERM))
fault("SIGKILL of the fork server", SFT, RL)(partial(strike, role="fork_server", number=signal.SIGKILL))


@fault("SIGKILL of everything", DATA, SFT, RL, own_server=True)
def kill_everything(trial: Trial) -> Ended:
    with trial.running() as command:
        if aim(trial, command, "flow") is not None:
            trial.killed_flow = True
            trial.struck = send(signal.SIGKILL, *members(trial.homes.home))
    return command.wait()


@fault("SIGKILL of the resumed trainer", SFT, RL, template="half")
def kill_the_resumed(trial: Trial) -> Ended:
    return strike(trial, "trainer", signal.SIGKILL)


@fault("SIGTERM, then SIGINT, of the flow", SFT, RL)
def two_signals(trial: Trial) -> Ended:
    with trial.running() as command:
        pid = aim(trial, command, "flow")
        if pid is not None and trial.find(command, "trainer") is not None:
            trial.killed_flow = True
            first = send(signal.SIGTERM, pid)
            time.sleep(trial.chance.uniform(0.1, 2.0))
            asked = time.monotonic()
            trial.struck = send(signal.SIGINT, pid) and first
            command.wait()
            if (took := time.monotonic() - asked) > 30:
                trial.wrongs.append(f"it took {took:.0f} s to end")
    return command.wait()


@fault("SIGSTOP of the trainer, for good", SFT, RL)
def stop_for_good(trial: Trial) -> Ended:
    """It has to be reported; Ctrl-C then ends the run although the trainer cannot hear."""
    with trial.running() as command:
        pid = aim(trial, command, "trainer")
        if pid is not None and pid in with_role(trial.homes.home, "trainer"):
            trial.struck = send(signal.SIGSTOP, pid)
            trial.undo.append(partial(send, signal.SIGCONT, pid))
            deadline = time.monotonic() + NOTICED_S
            while command.process.poll() is None and "stopped" not in command.said() and time.monotonic() < deadline:
                time.sleep(0.1)
            if command.process.poll() is None:
                if "stopped" not in command.said():
                    trial.wrongs.append(f"a stopped trainer is not reported in {NOTICED_S:g} s")
                trial.killed_flow = True
                send(signal.SIGINT, command.process.pid)
    return command.wait()
