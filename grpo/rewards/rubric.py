"""Rubrics: weighted criteria in a problem's metadata, judged one by one.

``metadata["rubric"]`` is a list of texts, each of weight 1, or of ``{"criterion": text, "weight": number}``. A negative
weight is for a fault: it is subtracted if the response has the fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo.errors import InputError


class Criterion(NamedTuple):
    """Something that a response should do or, with a negative weight, should not do."""

    text: str
    weight: float


def read_rubric(metadata: Mapping[str, Any]) -> list[Criterion]:
    """The criteria; empty if the metadata has no rubric. Raises InputError if the rubric is malformed."""
    if "rubric" not in metadata or metadata["rubric"] is None:
        return []
    rubric = metadata["rubric"]
    if not isinstance(rubric, list) or not rubric:
        raise InputError(f"rubric: a list of at least one criterion is needed, got {_short(rubric)}")
    criteria = [_criterion(number, entry) for number, entry in enumerate(rubric)]
    if not any(criterion.weight > 0 for criterion in criteria):
        raise InputError("rubric: no criterion has a positive weight, so no response could earn anything")
    return criteria


def _criterion(number: int, entry: Any) -> Criterion:
    if isinstance(entry, str):
        entry = {"criterion": entry}
    if isinstance(entry, dict):  # parquet fills absent fields with null
        entry = {name: value for name, value in entry.items() if value is not None}
    known = isinstance(entry, dict) and "criterion" in entry and entry.keys() <= {"criterion", "weight"}
    if not known or not isinstance(entry["criterion"], str) or not entry["criterion"].strip():
        raise InputError(
            f'rubric: criterion {number} must be a text or {{"criterion": text, "weight": number}}, got {_short(entry)}'
        )
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight == 0:
        raise InputError(f"rubric: criterion {number}: weight {_short(weight)} must be a number other than 0")
    return Criterion(entry["criterion"].strip(), float(weight))


def rubric_score(criteria: Sequence[Criterion], fulfilled: Sequence[bool | None]) -> float:
    """Weighted share of the fulfilled criteria, 0..1. An undecided criterion counts against the response."""
    met = [
        criterion.weight
        for criterion, verdict in zip(criteria, fulfilled, strict=True)
        if (criterion.weight < 0 if verdict is None else verdict)
    ]
    return max(0.0, sum(met) / sum(criterion.weight for criterion in criteria if criterion.weight > 0))


def _short(value: Any) -> str:
    return json.dumps(value, default=repr)[:80]
