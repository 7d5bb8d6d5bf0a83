"""Progress of a recipe: on a terminal one live line, in a log a line every few seconds.

Everything goes to stderr; stdout is for results.
"""

from __future__ import annotations

import sys
import time
from typing import Any, ClassVar

from rich.console import Console

from grpo.secret_values import masked

LOG_EVERY_S = 10.0
_SHOWN = ("reward", "loss", "accuracy")


class Progress:
    """The progress display of the process; stages run one after another."""

    _current: ClassVar[Progress | None] = None

    def __init__(self, console: Console | None = None):
        self.console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._status: Any = None
        self._began = time.monotonic()
        self._job: tuple[str, str] | None = None
        self._first: tuple[float, int] = (0.0, 0)
        self._logged = 0.0

    @classmethod
    def current(cls) -> Progress:
        if cls._current is None:
            cls._current = cls()
        return cls._current

    def started(self, stage: str) -> None:
        self._began = self._logged = time.monotonic()
        self._job = None
        self._show(f"{stage}: starting")

    def update(self, stage: str, job: str, record: dict[str, Any]) -> str:
        """Shows one record of a job's metrics: step, main metric, speed, time left. Returns the record."""
        now = time.monotonic()
        step, of = int(record["step"]), int(record.get("of", 0))
        if self._job != (stage, job):
            self._job, self._first = (stage, job), (now, step)
        since, from_step = self._first
        parts = [f"step {step}/{of}"]
        parts += [f"{name} {record[name]:.3f}" for name in _SHOWN if name in record][:1]
        if record.get("tokens_per_s"):
            parts.append(f"{record['tokens_per_s']:,.0f} tokens/s")
        if step > from_step and of:
            parts.append(f"{duration((now - since) / (step - from_step) * (of - step))} left")
        line = " · ".join(parts)
        self._show(f"{stage}{'/' + job if job else ''}: {line}")
        return line

    def finished(self, stage: str, status: str, seconds: float, metrics: dict[str, float | None]) -> None:
        self._clear()
        shown = " · ".join(f"{k} {v:.3f}" for k, v in list(metrics.items())[:4] if isinstance(v, float))
        took = duration(seconds) if status == "ran" else "reused"
        self.console.print(f"{stage:<16} {took:>8}  {shown}", markup=False)

    def failed(self, stage: str, reason: str) -> None:
        self._clear()
        self.console.print(f"{stage:<16} {'failed' if reason else 'stopped':>8}  {masked(reason)}", markup=False)

    def say(self, line: str) -> None:
        """Prints a line that stays. It may name a server's address, so secrets are masked."""
        self._clear()
        self.console.print(masked(line), markup=False)

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


def duration(seconds: float) -> str:
    """Seconds as text: 45s, 3m20s or 2h05m."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
