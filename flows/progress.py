"""Progress of a recipe: one live line in a terminal, or a line every few seconds in a log.

Everything goes to stderr; stdout is for results. This module's logger gets the same lines. It has no handler of its
own: PREFECT_LOGGING_EXTRA_LOGGERS adds Prefect's, which sends them to the logs of the current flow run.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from rich.console import Console

from grpo.secret_values import masked
from tasks.printable import printable

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)
logger.propagate = False  # the console already has the line
logger.addHandler(logging.NullHandler())

LOG_EVERY_S = 10.0
"""Seconds between two lines in a log."""
_SHOWN = ("reward", "loss", "accuracy")


class Progress:
    """The progress display of this process. Stages run one after another."""

    _current: ClassVar[Progress | None] = None

    def __init__(self, console: Console | None = None):
        # Rich takes 80 columns for the width of a file or a pipe, whose lines are not wrapped.
        self.console = console or Console(file=sys.stderr, highlight=False, soft_wrap=not sys.stderr.isatty())
        self._status: Any = None
        self._began = time.monotonic()
        self._job: tuple[str, str] | None = None
        self._first: tuple[float, int] = (0.0, 0)
        self._step = 0
        self._logged = 0.0
        self._told = -LOG_EVERY_S

    @classmethod
    def current(cls) -> Progress:
        if cls._current is None:
            cls._current = cls()
        return cls._current

    def started(self, stage: str) -> None:
        self._began = self._logged = time.monotonic()
        self._job = None
        self._show(f"{stage}: starting")
        self.tell(f"{stage}: starting")

    def update(self, stage: str, job: str, record: dict[str, Any]) -> str:
        """Shows one record of a job's metrics: step, main metric, speed, time left. Returns it as text."""
        now = time.monotonic()
        step, of = int(record["step"]), int(record.get("of", 0))
        if self._job != (stage, job) or step < self._step:  # another job, or the job's next batch
            self._job, self._first = (stage, job), (now, step)
            self._told = -LOG_EVERY_S
        self._step = step
        since, from_step = self._first
        parts = [f"step {step}/{of}"]
        parts += [f"{name} {record[name]:.3f}" for name in _SHOWN if name in record][:1]
        if record.get("tokens_per_s"):
            parts.append(f"{record['tokens_per_s']:,.0f} tokens/s")
        if step > from_step and of:
            parts.append(f"{duration((now - since) / (step - from_step) * (of - step))} left")
        line = " · ".join(parts)
        whole = f"{stage}{'/' + job if job else ''}: {line}"
        self._show(whole)
        if step == of or now - self._told >= LOG_EVERY_S:
            self._told = now
            self.tell(whole)
        return line

    def finished(
        self,
        stage: str,
        status: str,
        seconds: float,
        metrics: Mapping[str, float | None],
        counts: Mapping[str, int],
    ) -> None:
        self._clear()
        took = duration(seconds) if status == "ran" else "reused"
        shares = {name: value for name, value in metrics.items() if isinstance(value, float)}
        overflow: Any = None if self.console.soft_wrap else "ellipsis"  # a row is cut
        row = f"{stage:<16} {took:>8}  {_numbers(shares, 4)}"
        self.console.print(row, markup=False, no_wrap=True, overflow=overflow)
        self.tell(finished_line(stage, status, seconds, {**counts, **metrics}))

    def failed(self, stage: str, reason: str) -> None:
        self._clear()
        reason = printable(masked(reason))
        self.console.print(f"{stage:<16} {'failed' if reason else 'stopped':>8}  {reason}", markup=False)
        logger.error("%s: %s", stage, f"failed: {reason}" if reason else "stopped")

    def say(self, line: str) -> None:
        """Prints a permanent line. Masks secrets, because it may contain a server's address, and replaces control
        characters, because it may contain a model's text."""
        self._clear()
        self.console.print(printable(masked(line)), markup=False)
        self.tell(line)

    def tell(self, line: str) -> None:
        """Logs a line without printing it here."""
        logger.info("%s", printable(masked(line)))

    def _show(self, line: str) -> None:
        if self.console.is_terminal:
            if self._status is None:
                self._status = self.console.status(line)
                self._status.start()
            self._status.update(line)
        elif time.monotonic() - self._logged >= LOG_EVERY_S:
            self._logged = time.monotonic()
            self.console.print(line, markup=False)

    def _clear(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def finished_line(stage: str, status: str, seconds: float, numbers: Mapping[str, float | None]) -> str:
    """How a stage ended, as a log line: `sft: made in 3m20s · examples 1,024 · loss 0.412`."""
    shown = _numbers({name: value for name, value in numbers.items() if value != 0}, 12)
    made = f"made in {duration(seconds)}" if status == "ran" else "reused"
    return f"{stage}: {made}{' · ' if shown else ''}{shown}"


def checkpoint_line(name: str, metrics: Mapping[str, object]) -> str:
    """A row of the closing table, as a log line: `dev1: pass@1 0.512 · format 0.960`."""
    numbers = {metric: value for metric, value in metrics.items() if isinstance(value, float)}
    return f"{name}: {_numbers(numbers, 8)}"


def _numbers(numbers: Mapping[str, float | None], most: int) -> str:
    known = [(name, value) for name, value in numbers.items() if value is not None][:most]
    return " · ".join(f"{name} {value:{'.3f' if isinstance(value, float) else ','}}" for name, value in known)


def duration(seconds: float) -> str:
    """A duration as text: 45s, 3m20s or 2h05m."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
