"""The claims of claims.toml, and the seeds that they are put to the test on."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FILE = Path(__file__).with_suffix(".toml")
_INTERVAL = "_ci95"


class Claim(BaseModel):
    """A bound of a number, or of the difference of two."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    says: str
    metric: str = Field(pattern=r"^\w+/\S+$")
    minus: str | None = Field(None, pattern=r"^\w+/\S+$")
    at_least: float | None = None
    at_most: float | None = None
    share: bool = True

    @model_validator(mode="after")
    def _one_bound(self) -> Claim:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"claim {self.says!r}: give either at_least or at_most")
        return self

    def value(self, result: Mapping[str, Any]) -> float:
        """The number in the result of `r1 run --json`. Raises KeyError where it is missing."""
        return look_up(result, self.metric) - (look_up(result, self.minus) if self.minus else 0.0)

    def holds(self, value: float) -> bool:
        bound = self.at_most if self.at_least is None else self.at_least
        assert bound is not None
        return value <= bound + 1e-9 if self.at_least is None else value >= bound - 1e-9

    @property
    def bound(self) -> str:
        kind, bound = ("at most", self.at_most) if self.at_least is None else ("at least", self.at_least)
        assert bound is not None
        return f"{kind} {self.shown(bound)}"

    def shown(self, value: float) -> str:
        return f"{100 * value:.1f}" if self.share else f"{value:.2f}"


class SeedRule(BaseModel):
    """Which seeds the report is of: nobody chooses them, and nobody has seen them while settings were chosen."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    start: int = Field(alias="from")
    count: int = Field(ge=1)
    first_digits: str = Field(pattern=r"^[0-9a-f]+$")
    tuned_on: list[int]

    def seeds(self) -> list[int]:
        """The seeds of the report, ascending."""
        found: list[int] = []
        number = self.start
        while len(found) < self.count:
            if hashlib.sha256(str(number).encode()).hexdigest()[0] in self.first_digits:
                found.append(number)
            number += 1
        return found


class Claims(BaseModel):
    """The file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seeds: SeedRule
    claims: list[Claim] = Field(min_length=1)

    @classmethod
    def read(cls, path: Path = FILE) -> Claims:
        return cls.model_validate(tomllib.loads(path.read_text()))


def look_up(result: Mapping[str, Any], name: str) -> float:
    """A number by CHECKPOINT/METRIC or STAGE/METRIC; METRIC_low and METRIC_high are bounds of an interval."""
    owner, _, metric = name.partition("/")
    stages: dict[str, Any] = {stage["name"]: stage["metrics"] for stage in result["stages"]}
    metrics = result["checkpoints"].get(owner) or stages.get(owner)
    if metrics is None:
        raise KeyError(f"{name}: the run has no checkpoint or stage {owner!r}")
    bounds: dict[Literal["_low", "_high"], int] = {"_low": 0, "_high": 1}
    for end, place in bounds.items():
        if metric not in metrics and metric.endswith(end):
            return float(metrics[metric.removesuffix(end) + _INTERVAL][place])
    if metric not in metrics:
        raise KeyError(f"{name}: there is no such metric")
    return float(metrics[metric])
