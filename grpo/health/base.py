"""The base of all health checks: its settings, its state and its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from grpo.settings import Settings

Action = Literal["ignore", "warn", "stop", "roll_back"]
Record = Mapping[str, float]
"""Metrics of one step, by name: one line of metrics.jsonl."""


class CheckSettings(Settings):
    """Fields of every check. The default is to warn if the symptom can also mean success or a change of task."""

    action: Action = Field(
        "warn",
        description="'ignore': not checked. 'warn': reported. 'stop': training ends. 'roll_back': training returns to "
        "the last checkpoint.",
    )
    steps: int = Field(
        1, ge=1, description="Consecutive bad values before the failure is reported; steps without a value are skipped."
    )


class AgainstRecent(CheckSettings):
    """Fields of a check that compares a value with the recent ones."""

    window: int = Field(20, ge=2, description="Preceding values whose median is the usual value. Ours.")

    @model_validator(mode="after")
    def _window_outlasts_steps(self) -> AgainstRecent:
        if self.window < 2 * self.steps:
            raise ValueError(f"window ({self.window}) must be at least twice steps ({self.steps})")
        return self


@dataclass(frozen=True)
class HealthEvent:
    """A failure that begins at `step`: the check's name, the action to take, and one line for the user."""

    name: str
    action: Action
    message: str
    step: int


@dataclass
class CheckState:
    """One check's memory of earlier steps. Every checkpoint contains its fields."""

    bad: int = 0  # consecutive bad values
    good: int = 0  # consecutive good values
    said: bool = False  # whether the current failure has been reported
    best: float | None = None
    early: dict[str, list[float]] = field(default_factory=dict)
    recent: dict[str, list[float]] = field(default_factory=dict)

    def first(self, name: str, value: float, count: int) -> list[float]:
        """Returns the first `count` values of a metric; adds `value` while there are fewer."""
        values = self.early.setdefault(name, [])
        if len(values) < count:
            values.append(value)
        return values

    def last(self, name: str, value: float, count: int) -> list[float]:
        """Returns the `count` values before this one (fewer at the start), and stores this one."""
        values = self.recent.get(name, [])[-count:]
        self.recent[name] = [*values, value][-count:]
        return values


class CheckResult(NamedTuple):
    """Whether a step's value is bad, the evidence (the number and its limit), and advice to the user."""

    bad: bool
    evidence: str
    advice: str


Check = Callable[[Any, CheckState, Record], CheckResult | None]
"""(the check's settings, its state, record) -> its result; None if the record or state is not sufficient yet."""


def finite(record: Record, *names: str) -> float | None:
    """The first of the named metrics that is a finite number in the record; None if none is."""
    return next((record[name] for name in names if name in record and math.isfinite(record[name])), None)
