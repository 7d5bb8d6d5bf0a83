"""Promotion gates: conditions on a stage's result that must hold before the next stage starts.

This module evaluates a gate on given metrics; flows/run/gates/gatekeeper.py gathers the metrics and acts.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from grpo.errors import InputError

Source = Literal["stage", "evaluation", "table"]
Values = Mapping[tuple[Source, str], Mapping[str, float | None]]
"""(source of the metric, stage) -> metrics of that stage."""
_SLACK = 1e-9  # 0.653 - 0.03 is slightly below 0.623 in floating point


class Condition(BaseModel):
    """A bound on one metric: exactly one of `above`, `below`, `not_below_stage`, `not_above_stage`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field(min_length=1, description="Name of the metric, such as pass@1 or language.")
    source: Source = Field(
        "stage",
        description="stage: metrics and counts of the stage's manifest, as `r1 show` prints them. evaluation: the "
        "gate's own small evaluation of the stage's checkpoint. table: the closing table (gates after evaluate).",
    )
    stage: str | None = Field(None, description="Stage whose metric is read. None: the stage that the gate follows.")
    above: float | None = Field(None, description="The metric must exceed this value, in the metric's own unit.")
    below: float | None = Field(None, description="The metric must be below this value, in the metric's own unit.")
    not_below_stage: str | None = Field(
        None, description="The metric may be at most `points` below that of this other stage."
    )
    not_above_stage: str | None = Field(
        None, description="The metric may be at most `points` above that of this other stage."
    )
    points: float = Field(
        0.0, ge=0, description="Allowed difference in hundredths: percentage points of a share. 3: 0.03."
    )

    @property
    def compared(self) -> str | None:
        """The stage whose metric serves as the bound, if any."""
        return self.not_below_stage or self.not_above_stage

    @model_validator(mode="after")
    def _one_demand(self) -> Condition:
        demands = ("above", "below", "not_below_stage", "not_above_stage")
        bounds = [name for name in demands if getattr(self, name) is not None]
        if len(bounds) != 1:
            raise ValueError(f"give exactly one of {', '.join(demands)}; given: {', '.join(bounds) or 'none'}")
        if self.points and not self.compared:
            raise ValueError(f"points belong to not_below_stage and not_above_stage; with {bounds[0]} change the value")
        return self


class GateEvaluation(BaseModel):
    """A small evaluation of checkpoints before the end of the recipe, on held-out problems."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    problems: int = Field(64, ge=1, description="Maximum held-out reasoning problems.")
    general: int = Field(
        0, ge=0, description="Maximum held-out general prompts, for refusals and instruction following."
    )
    samples_per_problem: int = Field(4, ge=1, description="Samples per problem: pass@1 is their mean.")


class Gate(BaseModel):
    """Conditions on a stage's result, and what happens if one fails."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]*$", description="Gate name, for the record and for --approve.")
    after: str = Field(description="Stage that the gate follows; it is decided before the next stage starts.")
    conditions: list[Condition] = Field([], description="All must hold. At least one, unless there is a review.")
    review: int | None = Field(
        None,
        ge=1,
        le=100,
        exclude_if=lambda samples: samples is None,
        description="A person decides even if all conditions hold, and sees this many examples of the data set that "
        "the stage wrote. R1: people checked the cold-start data. None: no review.",
    )
    on_failure: Literal["stop", "warn", "ask"] = Field(
        "stop",
        description="stop: end the recipe. warn: print a line and continue. ask: wait for a person, in the Prefect UI "
        "if there is a server, else on the terminal.",
    )
    evaluate: GateEvaluation | None = Field(
        None, description="Sample the stage's checkpoint, and those it is compared with, before the gate is decided."
    )
    wait_hours: float = Field(
        168.0, gt=0, le=8760, description="ask, in Prefect: hours after which an undecided run fails."
    )

    @model_validator(mode="after")
    def _sources_exist(self) -> Gate:
        if not self.conditions and self.review is None:
            raise ValueError(f"gate {self.name!r} has neither conditions nor a review; give one of them")
        evaluated = any(condition.source == "evaluation" for condition in self.conditions)
        if evaluated != (self.evaluate is not None):
            missing, there = (
                ("evaluate", "a condition") if evaluated else ("a condition of source 'evaluation'", "evaluate")
            )
            raise ValueError(f"gate {self.name!r} has {there} but not {missing}; the two belong together")
        if self.after != "evaluate" and any(condition.source == "table" for condition in self.conditions):
            raise ValueError(f"gate {self.name!r}: the closing table exists only after evaluate; set source or after")
        for condition in self.conditions:
            if condition.compared == self.stage_of(condition):
                raise ValueError(f"gate {self.name!r}: {condition.metric} is held against the same stage's own")
            if condition.source == "table" and condition.stage is None:
                raise ValueError(f"gate {self.name!r}: say which stage's row of the table {condition.metric} is of")
        return self

    def stage_of(self, condition: Condition) -> str:
        """The stage whose metric a condition reads."""
        return condition.stage or self.after

    def stages(self, source: Source | None = None) -> set[str]:
        """Stages whose metrics the gate reads (from one source, or from all), its own stage included."""
        read = [c for c in self.conditions if source in (None, c.source)]
        named = {self.stage_of(c) for c in read} | {c.compared for c in read if c.compared}
        return named | ({self.after} if source is None else set())


class Finding(NamedTuple):
    """The outcome of one condition, and the numbers behind it on one line."""

    passed: bool
    evidence: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of a gate."""

    gate: str
    after: str
    findings: tuple[Finding, ...]
    samples: tuple[str, ...] = ()  # Markdown, for a human review
    reviewed: str = ""  # digest of the artifact that the samples are from

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    @property
    def failures(self) -> list[str]:
        return [finding.evidence for finding in self.findings if not finding.passed]

    def lines(self) -> list[str]:
        """One line per condition, with its outcome."""
        return [f"{'passed' if f.passed else 'FAILED'}: {f.evidence}" for f in self.findings]

    def digest(self) -> str:
        """SHA-256 of the lines, the samples and the digest of the reviewed artifact, which identifies the evidence that
        a person saw. With the digest, since samples are only a part of the data, and long texts are cut."""
        reviewed = [self.reviewed] if self.reviewed else []
        return hashlib.sha256("\n".join([*self.lines(), *self.samples, *reviewed]).encode()).hexdigest()

    def markdown(self) -> str:
        """The lines as a Markdown list, which wraps in Prefect's narrow form."""
        rows = [f"- {'passed' if f.passed else '**failed**'}: {f.evidence}" for f in self.findings]
        outcome = "failed" if not self.passed else "to be reviewed" if self.samples else "passed"
        title = f"## Gate {self.gate} after {self.after}: {outcome}"
        return "\n".join([title, "", *rows, "", *self.samples])


def read_gate(gate: Gate, values: Values, names: Mapping[str, str]) -> Verdict:
    """Evaluates the gate's conditions on metrics. `names`: stage -> its name in the lines, such as dev2.

    Raises:
        InputError: a metric does not exist. A metric without a value (nothing could be measured) fails its condition.
    """
    return Verdict(gate.name, gate.after, tuple(_find(gate, condition, values, names) for condition in gate.conditions))


def decision_key(gate: Gate, artifacts: Mapping[str, str]) -> str:
    """Key of a decision: SHA-256 of the gate's conditions and of the keys of the artifacts (by stage) that it read."""
    conditions = gate.model_dump(mode="json", exclude={"on_failure", "wait_hours"})
    return hashlib.sha256(json.dumps([conditions, dict(artifacts)], sort_keys=True).encode()).hexdigest()


def _find(gate: Gate, condition: Condition, values: Values, names: Mapping[str, str]) -> Finding:
    stage = gate.stage_of(condition)
    name = names.get(stage, stage)
    value = _value(gate, condition, stage, values)
    if value is None:
        return Finding(False, f"{condition.metric} of {name} has no value: nothing was measured")
    if condition.compared is None:
        return _against_number(condition, name, value)
    other_name = names.get(condition.compared, condition.compared)
    other = _value(gate, condition, condition.compared, values)
    if other is None:
        return Finding(False, f"{condition.metric} of {other_name} has no value: nothing was measured")
    return _against_stage(condition, name, value, other_name, other)


def _value(gate: Gate, condition: Condition, stage: str, values: Values) -> float | None:
    metrics = values[condition.source, stage]
    if condition.metric not in metrics:
        close = difflib.get_close_matches(condition.metric, metrics, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(metrics)) or 'none'}"
        where = {"stage": "manifest", "evaluation": "evaluation", "table": "row of the closing table"}[condition.source]
        raise InputError(
            f"gate {gate.name!r}: stage {stage!r} has no metric {condition.metric!r} in its {where}; {hint}"
        )
    value = metrics[condition.metric]
    return None if value is None or math.isnan(value) else float(value)


def _against_number(condition: Condition, name: str, value: float) -> Finding:
    if condition.above is not None:
        passed, demand = value > condition.above, f"above {condition.above:g}"
    else:
        assert condition.below is not None
        passed, demand = value < condition.below, f"below {condition.below:g}"
    return Finding(passed, f"{condition.metric} of {name} is {value:.6g}; must be {demand}")


def _against_stage(condition: Condition, name: str, value: float, other_name: str, other: float) -> Finding:
    behind = other - value if condition.not_below_stage else value - other
    ours, theirs = (f"{100 * number:.4g}" for number in (value, other))
    side = "below" if value < other else "above"
    apart = f"{100 * abs(value - other):.4g} points {side}" if value != other else "level with"
    allowed = f"allowed {condition.points:g}{' below' if condition.not_below_stage else ' above'}"
    evidence = f"{condition.metric} of {name} is {ours}, {apart} {other_name} {theirs}; {allowed}"
    return Finding(behind <= condition.points / 100 + _SLACK, evidence)


def plain(values: Mapping[str, Any]) -> dict[str, float | None]:
    """The scalar numbers of a row, without intervals and texts."""
    return {k: v for k, v in values.items() if v is None or (isinstance(v, (int, float)) and not isinstance(v, bool))}
