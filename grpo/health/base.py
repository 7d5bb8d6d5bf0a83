"""What every check of a run's health has: settings, memory, and what it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from grpo.settings import Settings

Action = Literal["ignore", "warn", "stop", "roll_back"]
Record = Mapping[str, float]


class Watch(Settings):
    """What every failure has. The default is to warn where the sign can also mean success or a change of task."""

    action: Action = Field(
        "warn",
        description="'ignore': no look; 'warn': said; 'stop': training ends; 'roll_back': back to the last checkpoint.",
    )
    steps: int = Field(1, ge=1, description="Bad values in a row until it is said; gaps do not count. Ours.")


class AgainstRecent(Watch):
    window: int = Field(20, ge=2, description="Values before this one whose median is the usual. Ours.")

    @model_validator(mode="after")
    def _window_outlasts_steps(self) -> AgainstRecent:
        if self.window < 2 * self.steps:
            raise ValueError(f"window ({self.window}) must be at least twice steps ({self.steps})")
        return self


@dataclass(frozen=True)
class Finding:
    name: str
    action: Action
    message: str  # one line
    step: int


@dataclass
class Memory:
    """What one check knows of the steps before."""

    bad: int = 0  # values in a row
    good: int = 0
    said: bool = False
    best: float | None = None
    early: dict[str, list[float]] = field(default_factory=dict)
    recent: dict[str, list[float]] = field(default_factory=dict)

    def first(self, name: str, value: float, count: int) -> list[float]:
        """The first `count` values of a metric, with this one where it is among them."""
        values = self.early.setdefault(name, [])
        if len(values) < count:
            values.append(value)
        return values

    def last(self, name: str, value: float, count: int) -> list[float]:
        """The `count` values before this one (fewer at the beginning), which is kept for the next time."""
        values = self.recent.get(name, [])[-count:]
        self.recent[name] = [*values, value][-count:]
        return values


class Reading(NamedTuple):
    bad: bool
    seen: str  # the number and its limit
    advice: str


Check = Callable[[Any, Memory, Record], Reading | None]
"""(settings of this failure, its memory, record) -> None where the record or the memory does not yet suffice."""


def finite(record: Record, *names: str) -> float | None:
    """The first of these metrics that the record has as a finite number."""
    return next((record[name] for name in names if name in record and math.isfinite(record[name])), None)
