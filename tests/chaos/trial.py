"""One try: a run of a target stage under a fault, the run after it, and the verdict."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from grpo.errors import InputError
from tasks.store.store import Store
from tests.chaos.homes import R1, Homes, left_running
from tests.chaos.processes import end_all, leftovers, with_role
from tests.chaos.zygote import Forked, Zygote

HEALED, BY_RERUN, CLEAR, WRONG = "healed", "healed by rerun", "clear failure", "wrong"
LIMIT_S = 300.0
"""For one command. An undisturbed one takes some 15 s on a quiet core; the machine may be busy."""
GONE_S = 30.0
"""Processes of a command that ended have to be gone after so long: servers and trainers get time to shut down."""


@dataclass
class Ended:
    """How a command ended."""

    code: int
    said: str
    seconds: float
    hung: bool = False

    @property
    def last_line(self) -> str:
        """The last line of stderr that is no progress line."""
        lines = [line for line in self.said.replace("\r", "\n").splitlines() if line.strip()]
        return lines[-1] if lines else ""

    @property
    def is_clear(self) -> bool:
        """Whether it failed as promised: exit code 1 or 2 (130, 143 when stopped) and one line that says why."""
        one_line = re.match(r"(error|failed|stopped)\b.*: |stopped; ", self.last_line) is not None
        return self.code in (1, 2, 130, 143) and one_line and "Traceback" not in self.said


@dataclass
class Trial:
    """What a fault works with. `chance` is seeded by suite, kind and number of the try. `struck`: whether the fault was
    seen to strike; None: a command that fails is the only sign of it. `undo` takes the fault away, `closing` what the
    try itself held; `keeps`: prefix and environment are not part of the fault."""

    homes: Homes
    target: str
    chance: random.Random
    prefix: list[str] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)
    more: list[str] = field(default_factory=list)
    killed_flow: bool = False
    killed_other: bool = False  # a command beside the one that is judged, which leaves its run to the next command
    seen_home: Path | None = None
    struck: bool | None = None
    notes: list[str] = field(default_factory=list)
    wrongs: list[str] = field(default_factory=list)
    undo: list[Callable[[], object]] = field(default_factory=list)
    closing: list[Callable[[], object]] = field(default_factory=list)
    keeps: bool = False

    @property
    def home(self) -> Path:
        """The home of the try; in a mount namespace, the way there from outside."""
        return self.seen_home or self.homes.home

    def start(self, *more: str) -> Command:
        """Start the command under test."""
        command = [*self.prefix, *self.homes.command(self.target, *self.more, *more)]
        return Command(command, {**self.homes.environment(), **self.extra}, self.homes.zygote)

    @contextmanager
    def running(self) -> Iterator[Command]:
        """The command under test, started; awaited at the end of the block."""
        command = self.start()
        self.undo.append(command.kill)
        yield command
        command.wait()

    def whole(self) -> Ended:
        """Runs the command under test to its end, with nothing beside it."""
        with self.running() as command:
            pass
        return command.wait()

    def find(self, command: Command, role: str) -> int | None:
        """Wait for a process of this role and return one; None if the command ended first."""
        while command.process.poll() is None:
            if role == "flow":
                return command.process.pid
            if found := with_role(self.homes.home, role):
                return self.chance.choice(found)
            time.sleep(0.02)
        return None

    def moment(self, command: Command, seconds: float) -> None:
        """Wait a seeded part of `seconds`, or until the command ends."""
        wait = self.chance.uniform(0, seconds)
        self.notes.append(f"after {wait:.2f} s")
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline and command.process.poll() is None:
            time.sleep(0.01)

    def heal(self) -> None:
        """Take the fault away."""
        while self.undo:
            self.undo.pop()()
        self.more = []
        if not self.keeps:
            self.prefix, self.extra = [], {}


class Command:
    """A command under test; `ended` once it was awaited."""

    def __init__(self, command: list[str], environment: dict[str, str], zygote: Zygote | None = None):
        self.began = time.monotonic()
        self.output = tempfile.NamedTemporaryFile()  # noqa: SIM115 - lives as long as the command
        self.process: subprocess.Popen[bytes] | Forked
        if zygote is not None and command[:3] == R1 and environment == zygote.environment:
            self.process = zygote.fork(command[3:], self.output.name)
        else:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.output
            )
        self.ended: Ended | None = None

    def said(self) -> str:
        """What it has written to stderr so far."""
        return os.pread(self.output.fileno(), 2**24, 0).decode(errors="replace")

    def wait(self) -> Ended:
        """Wait for its end, up to LIMIT_S."""
        if self.ended is None:
            while self.process.poll() is None and time.monotonic() < self.began + LIMIT_S:
                time.sleep(0.05)
            hung = self.process.poll() is None
            self.kill()
            assert self.process.returncode is not None
            self.ended = Ended(self.process.returncode, self.said(), time.monotonic() - self.began, hung)
        return self.ended

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        while self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            time.sleep(0.02)


def broken(trial: Trial) -> str | None:
    """What is wrong with a command that ended with 0; None if nothing is."""
    store = Store(trial.home)
    key, expected = trial.homes.expected(trial.target)
    made = [manifest for manifest in store.list() if manifest.stage == trial.target]
    if not made:
        return "exit code 0 without a readable artifact"
    assert made[-1].key == key, "the templates are of another version of the code: remove their folder"
    if made[-1].digest != expected:
        return f"another digest: {made[-1].digest[:12]} instead of {expected[:12]}"
    try:
        store.check(made[-1], every_byte=True)
    except InputError as error:
        return f"corrupt and read as complete: {error}"
    return None


def finish(trial: Trial, first: Ended) -> tuple[str, str]:
    """The verdict on a try whose first command has ended, and why. Runs the same command again where it failed."""
    if trial.wrongs:
        return WRONG, "; ".join(trial.wrongs)
    if first.hung:
        return WRONG, f"hung for {LIMIT_S:g} s: {first.last_line[:200]}"
    if "Traceback (most recent call last)" in first.said:
        _, _, trace = first.said.partition("Traceback (most recent call last)")
        return WRONG, f"traceback: {' | '.join(trace.splitlines()[1:40])}; at the end: {first.last_line[:300]}"
    if left := leftovers(trial.homes.home, GONE_S):
        return WRONG, f"left processes: {', '.join(left)}"
    if first.code == 0:
        wrong, left = broken(trial), left_running(trial.home)
        if wrong is None and left and not trial.killed_other:
            wrong = "a run is left RUNNING in MLflow"
        if wrong or not left:
            trial.heal()
            return (WRONG, wrong) if wrong else (HEALED, first.last_line[:200])
    elif not trial.killed_flow and not first.is_clear:
        return WRONG, f"exit code {first.code} without one clear line: {first.last_line[:300]}"
    trial.heal()
    with trial.running() as again:
        pass
    second = again.wait()
    if second.code != 0 or second.hung:
        return WRONG, f"first: {first.last_line[:200]}; the rerun: exit code {second.code}: {second.last_line[:300]}"
    if wrong := broken(trial):
        return WRONG, f"the rerun: {wrong}"
    if left_running(trial.home):
        return WRONG, "the rerun leaves a run RUNNING in MLflow"
    return (BY_RERUN if trial.killed_flow or trial.killed_other else CLEAR), first.last_line[:200]


def clean(trial: Trial) -> None:
    """End whatever is left of a try."""
    trial.heal()
    end_all(trial.homes.home)
    while trial.closing:
        trial.closing.pop()()
    shutil.rmtree(trial.homes.home, ignore_errors=True)
