"""The design of the study of the papers' claims, as paper_claims.toml states it."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from claims import SeedRule
from paper_claims_statistics import Expect
from pydantic import BaseModel, ConfigDict, Field, model_validator

FILE = Path(__file__).with_name("paper_claims.toml")
Graph = Literal["dev1", "rl", "zero", "small", "distill"]
OutcomeName = Literal[
    "auc",
    "auc_of_checkpoints",
    "pass@1",
    "cons@k",
    "pass@k",
    "language",
    "tokens_to_accuracy",
    "length_growth",
    "peak_mb",
]
STEPS_FIELD: Mapping[Graph, str] = {"rl": "reasoning_rl.steps", "small": "reasoning_rl.steps", "zero": "r1_zero.steps"}
"""Graph -> recipe field of the steps that sample the budget."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Arm(_Part):
    """One way to train. The fields are explained in paper_claims.toml."""

    graph: Graph
    overrides: list[str] = []
    rate: str | None = None
    rates: list[float] = []
    pilot_steps: int | None = Field(None, ge=1)
    steps: int | None = Field(None, ge=1)
    steps_of: str | None = None
    more_steps: int = Field(0, ge=0)
    like: str | None = None
    share: float = Field(1.0, gt=0, le=1)
    after: str | None = None
    keeps: list[str] = []
    checkpoints: list[float] = []
    evaluated: bool = True
    seconds: float | None = Field(None, gt=0)

    @property
    def counts_tokens(self) -> bool:
        """Whether the number of steps follows from the token budget."""
        return self.pilot_steps is not None and self.steps_of is None

    @property
    def builds_on(self) -> list[str]:
        """Names of the arms whose choices this one needs."""
        return [name for name in (self.like, self.after, self.steps_of) if name]


class Contrast(_Part):
    """Outcome of the arm `higher` - outcome of the arm `lower`, or - 0. `margin` and `sd` are in the outcome's unit."""

    higher: str
    lower: str | None = None
    outcome: OutcomeName
    margin: float = Field(ge=0)
    sd: float = Field(gt=0)
    expect: Expect = "higher"
    decides: bool = True

    @property
    def arms(self) -> list[str]:
        return [self.higher, *([self.lower] if self.lower else [])]


class PaperClaim(_Part):
    """A claim of a paper and the contrasts that decide it."""

    name: str = Field(pattern=r"^\w+$")
    says: str
    source: str
    contrasts: list[Contrast] = Field(min_length=1)

    @property
    def deciding(self) -> list[Contrast]:
        return [contrast for contrast in self.contrasts if contrast.decides]


class _Rates(_Part):
    grid: list[float] = Field(min_length=1)


class _Decision(_Part):
    level: float = Field(gt=0, lt=1)
    resamples: int = Field(ge=1000)


class Seconds(_Part):
    """Guessed seconds on one core: of each stage, of a step of RL, and of a run besides its stages."""

    stages: dict[str, float]
    step: float
    run: float


class Change(_Part):
    """What was changed in the design, and what had been run by then."""

    date: datetime.date
    after: str
    says: list[str] = Field(min_length=1)


class Design(_Part):
    """The whole file."""

    recipe: str
    overrides: list[str]
    budget_tokens: float = Field(gt=0)
    seeds: SeedRule
    learning_rates: _Rates
    decision: _Decision
    seconds: Seconds
    arms: dict[str, Arm]
    claims: list[PaperClaim] = Field(min_length=1)
    changes: list[Change] = []

    @classmethod
    def read(cls, path: Path = FILE) -> Design:
        return cls.model_validate(tomllib.loads(path.read_text()))

    @model_validator(mode="after")
    def _names_are_known(self) -> Design:
        for name, arm in self.arms.items():
            for other in arm.builds_on:
                if other not in self.arms:
                    raise ValueError(f"arm {name}: no arm {other!r}")
            if arm.after and self.arms[arm.after].after:
                raise ValueError(f"arm {name}: {arm.after!r} is a second round itself; there is no third")
            if arm.rate and arm.graph in STEPS_FIELD and not arm.pilot_steps:
                raise ValueError(f"arm {name}: give pilot_steps, the steps while its rate is chosen")
        for claim in self.claims:
            if not claim.deciding:
                raise ValueError(f"claim {claim.name}: no contrast decides it")
            for arm_name in (name for contrast in claim.contrasts for name in contrast.arms):
                if arm_name not in self.arms:
                    raise ValueError(f"claim {claim.name}: no arm {arm_name!r}")
        if set(self.seeds.seeds()) & set(self.seeds.tuned_on):
            raise ValueError("seeds: rates are chosen on seeds that the claims are tested on")
        return self

    def claims_named(self, names: Iterable[str]) -> list[PaperClaim]:
        """The claims with these names, in the order of the file; all without names.

        Raises:
            ValueError: no claim has one of the names.
        """
        wanted = set(names)
        known = {claim.name for claim in self.claims}
        if unknown := sorted(wanted - known):
            raise ValueError(
                f"no question {unknown[0]!r}; choose from {', '.join(claim.name for claim in self.claims)}"
            )
        return [claim for claim in self.claims if not wanted or claim.name in wanted]

    def arms_for(self, claims: Iterable[PaperClaim]) -> list[str]:
        """Names of the arms that the claims compare and of those that these build on, each after what it builds on."""
        ordered: dict[str, None] = {}

        def add(name: str) -> None:
            for other in self.arms[name].builds_on:
                add(other)
            ordered.setdefault(name)

        for contrast in (contrast for claim in claims for contrast in claim.contrasts):
            for name in contrast.arms:
                if contrast.outcome == "auc_of_checkpoints":
                    add("dev1")  # the curve begins with it
                add(name)
        return list(ordered)

    def rates_of(self, arm: Arm) -> list[float]:
        return arm.rates or self.learning_rates.grid


@dataclass(frozen=True)
class Choice:
    """Learning rate and number of RL steps of an arm. None: the recipe's or those of `like`."""

    rate: float | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Run:
    """One training of an arm and the evaluation of what it made. `steps` None: the recipe's, or no RL of its own."""

    arm: str
    seed: int
    rate: float | None = None
    steps: int | None = None

    @property
    def name(self) -> str:
        of_rate = f" at {self.rate:g}" if self.rate is not None else ""
        of_steps = f", {self.steps} steps" if self.steps is not None else ""
        return f"{self.arm}{of_rate}{of_steps}, seed {self.seed}"


def own_overrides(arm: Arm, rate: float | None, steps: int | None) -> list[str]:
    """Overrides of the recipe that one arm adds to those of `like`."""
    added = [*arm.overrides]
    if arm.rate is not None and rate is not None:
        added.append(f"{arm.rate}={rate!r}")
    if steps is not None and arm.graph in STEPS_FIELD:
        added.append(f"{STEPS_FIELD[arm.graph]}={steps}")
    return added


def overrides_of(design: Design, run: Run, choices: Mapping[str, Choice]) -> list[str]:
    """All overrides of the recipe for a run. Later ones replace earlier ones."""
    chain = [design.arms[run.arm]]
    overrides = own_overrides(chain[0], run.rate, run.steps)
    name = chain[0].like
    while name is not None:
        arm, choice = design.arms[name], choices[name]
        overrides = own_overrides(arm, choice.rate, choice.steps) + overrides
        name = arm.like
    return [*design.overrides, *overrides]


def start_of(design: Design, run: Run, choices: Mapping[str, Choice]) -> dict[str, Any] | None:
    """What a second round starts from: its first round, and what it keeps of that. None for others."""
    arm = design.arms[run.arm]
    if arm.after is None:
        return None
    choice = choices[arm.after]
    first = Run(arm.after, run.seed, choice.rate, choice.steps)
    return {"run": asdict(first), "overrides": overrides_of(design, first, choices), "keeps": arm.keeps}
