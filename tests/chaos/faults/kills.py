"""Signals to one process of a run, at a seeded moment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import partial

from tests.chaos.faults.registry import fault
from tests.chaos.processes import members, with_role
from tests.chaos.trial import Command, Ended, Trial

DATA, SFT, RL = "cold_start_data", "cold_start_sft", "reasoning_rl"
SPAN_S = {DATA: 4.0, SFT: 6.0, RL: 12.0}
"""Seconds from the start of a role to the end of a stage, on a quiet core: signals fall anywhere in it."""
STOPPED_S = 3.0
NOTICED_S = 60.0
"""A stopped trainer has to be reported within this time."""


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def aim(trial: Trial, command: Command, role: str) -> int | None:
    """A process of the role, at a seeded moment of its life; None if the command ended before."""
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
            send(pid, number)
    return command.wait()


def stop_for_a_while(trial: Trial, role: str) -> Ended:
    """SIGSTOP, and SIGCONT some seconds later."""
    with trial.running() as command:
        pid = aim(trial, command, role)
        if pid is not None:
            send(pid, signal.SIGSTOP)
            trial.undo.append(partial(send, pid, signal.SIGCONT))
            time.sleep(trial.chance.uniform(0.5, STOPPED_S))
            send(pid, signal.SIGCONT)
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
            for pid in members(trial.homes.home):
                send(pid, signal.SIGKILL)
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
            send(pid, signal.SIGTERM)
            time.sleep(trial.chance.uniform(0.1, 2.0))
            asked = time.monotonic()
            send(pid, signal.SIGINT)
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
            send(pid, signal.SIGSTOP)
            trial.undo.append(partial(send, pid, signal.SIGCONT))
            deadline = time.monotonic() + NOTICED_S
            while command.process.poll() is None and "stopped" not in command.said() and time.monotonic() < deadline:
                time.sleep(0.1)
            if command.process.poll() is None:
                if "stopped" not in command.said():
                    trial.wrongs.append(f"a stopped trainer is not reported in {NOTICED_S:g} s")
                trial.killed_flow = True
                send(command.process.pid, signal.SIGINT)
    return command.wait()
