"""Gates: both sides of every boundary, and what a gate may not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from grpo.errors import InputError
from tasks.gates.approvals import Decision, Decisions
from tasks.gates.conditions import Condition, Gate, decision_key, plain, read_gate

NAMES = {"cold_start_sft": "dev1", "reasoning_rl": "dev2"}


def gate(*conditions: dict[str, Any], **values: Any) -> Gate:
    return Gate(name="g", after="reasoning_rl", conditions=[Condition(**c) for c in conditions], **values)


def read(condition: dict[str, Any], dev2: float | None, dev1: float | None = None) -> tuple[bool, str]:
    metric = condition["metric"]
    values = {("stage", "reasoning_rl"): {metric: dev2}, ("stage", "cold_start_sft"): {metric: dev1}}
    verdict = read_gate(gate(condition), values, NAMES)
    assert verdict.passed == verdict.findings[0].passed
    return verdict.findings[0]


@pytest.mark.parametrize(("value", "passed"), [(0.9499, False), (0.95, False), (0.9501, True)])
def test_above(value: float, passed: bool) -> None:
    found = read({"metric": "language", "above": 0.95}, value)
    assert found == (passed, f"language of dev2 is {value:g}; must be above 0.95")


@pytest.mark.parametrize(("value", "passed"), [(0.0999, True), (0.1, False), (0.1001, False)])
def test_below(value: float, passed: bool) -> None:
    found = read({"metric": "over_refusal", "below": 0.1}, value)
    assert found == (passed, f"over_refusal of dev2 is {value:g}; must be below 0.1")


@pytest.mark.parametrize(
    ("dev2", "passed", "said"),
    [
        (0.612, False, "pass@1 of dev2 is 61.2, 4.1 points below dev1 65.3; allowed 3 below"),
        (0.6229, False, "pass@1 of dev2 is 62.29, 3.01 points below dev1 65.3; allowed 3 below"),
        (0.623, True, "pass@1 of dev2 is 62.3, 3 points below dev1 65.3; allowed 3 below"),
        (0.653, True, "pass@1 of dev2 is 65.3, level with dev1 65.3; allowed 3 below"),
        (0.8, True, "pass@1 of dev2 is 80, 14.7 points above dev1 65.3; allowed 3 below"),
    ],
)
def test_not_below_a_stage(dev2: float, passed: bool, said: str) -> None:
    condition = {"metric": "pass@1", "not_below_stage": "cold_start_sft", "points": 3}
    assert read(condition, dev2, 0.653) == (passed, said)


@pytest.mark.parametrize(("dev2", "passed"), [(0.14, True), (0.15, True), (0.1501, False), (0.05, True)])
def test_not_above_a_stage(dev2: float, passed: bool) -> None:
    condition = {"metric": "over_refusal", "not_above_stage": "cold_start_sft", "points": 5}
    assert read(condition, dev2, 0.1)[0] == passed


def test_no_points_allow_no_loss() -> None:
    condition = {"metric": "pass@1", "not_below_stage": "cold_start_sft"}
    assert read(condition, 0.5, 0.5)[0] and not read(condition, 0.4999, 0.5)[0]


@pytest.mark.parametrize("nothing", [None, float("nan")])
def test_what_was_not_measured_fails(nothing: float | None) -> None:
    assert read({"metric": "loss", "below": 1}, nothing) == (False, "loss of dev2 has no value: nothing was measured")
    condition = {"metric": "loss", "not_above_stage": "cold_start_sft"}
    assert read(condition, 1.0, nothing) == (False, "loss of dev1 has no value: nothing was measured")


def test_a_metric_that_is_not_there_is_an_error_with_what_is_near() -> None:
    with pytest.raises(InputError, match="no metric 'pass1' in its manifest; did you mean 'pass@1'"):
        read_gate(gate({"metric": "pass1", "above": 0}), {("stage", "reasoning_rl"): {"pass@1": 1.0}}, NAMES)


def test_one_failing_condition_fails_the_gate() -> None:
    values = {("stage", "reasoning_rl"): {"a": 1.0, "b": 1.0}}
    verdict = read_gate(gate({"metric": "a", "above": 0}, {"metric": "b", "above": 2}), values, {})
    assert not verdict.passed and verdict.failures == ["b of reasoning_rl is 1; must be above 2"]
    assert verdict.lines()[0] == "passed: a of reasoning_rl is 1; must be above 0"
    assert "- **failed**: b of reasoning_rl is 1; must be above 2" in verdict.markdown()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"metric": "a"}, "given: none"),
        ({"metric": "a", "above": 1, "below": 2}, "given: above, below"),
        ({"metric": "a", "above": 1, "points": 2}, "points belong to"),
        ({"metric": "a", "abov": 1}, "abov"),
    ],
)
def test_wrong_conditions(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Condition(**values)


@pytest.mark.parametrize(
    ("condition", "more", "said"),
    [
        ({"metric": "a", "above": 1, "source": "evaluation"}, {}, "not evaluate"),
        ({"metric": "a", "above": 1}, {"evaluate": {}}, "not a condition of source 'evaluation'"),
        ({"metric": "a", "above": 1, "source": "table", "stage": "sft"}, {}, "only after evaluate"),
        ({"metric": "a", "above": 1, "source": "table"}, {"after": "evaluate"}, "say which stage's row"),
        ({"metric": "a", "not_below_stage": "reasoning_rl"}, {}, "the same stage's own"),
        ({"metric": "a", "above": 1}, {"name": "No Name"}, "name"),
    ],
)
def test_wrong_gates(condition: dict[str, Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Gate(**{"name": "g", "after": "reasoning_rl", "conditions": [condition], **more})


def test_the_stages_that_a_gate_reads() -> None:
    one = {"metric": "pass@1", "source": "evaluation", "not_below_stage": "cold_start_sft"}
    two = {"metric": "loss", "below": 1, "stage": "base"}
    both = gate(one, two, evaluate={"problems": 8})
    assert both.stages() == {"reasoning_rl", "cold_start_sft", "base"}
    assert both.stages("evaluation") == {"reasoning_rl", "cold_start_sft"} and both.stages("stage") == {"base"}


def test_a_decision_belongs_to_conditions_and_artifacts() -> None:
    ask = gate({"metric": "a", "above": 1}, on_failure="ask")
    key = decision_key(ask, {"reasoning_rl": "k1"})
    assert key == decision_key(ask.model_copy(update={"on_failure": "warn", "wait_hours": 1}), {"reasoning_rl": "k1"})
    assert key != decision_key(ask, {"reasoning_rl": "k2"})
    assert key != decision_key(gate({"metric": "a", "above": 2}), {"reasoning_rl": "k1"})


def test_an_approval_stands_and_a_refusal_may_be_thought_over(tmp_path: Path) -> None:
    no, yes = (Decision.now("g", approved, "ada", "grün", "digest") for approved in (False, True))
    Decisions(tmp_path).add("key", no)
    assert Decisions(tmp_path).approval("key", "digest") is None and Decisions(tmp_path).of("key") == [no]
    Decisions(tmp_path).add("key", yes)
    assert Decisions(tmp_path).approval("key", "digest") == yes
    assert Decisions(tmp_path).approval("other", "digest") is Decisions(tmp_path).approval("key", "another") is None
    with (tmp_path / "gates" / "key.jsonl").open("a") as file:
        file.write('{"gate": "g", "appr')  # killed while it wrote
    assert Decisions(tmp_path).of("key") == [no, yes]


def test_intervals_are_no_single_numbers() -> None:
    assert plain({"pass@1": 0.5, "pass@1_ci95": [0, 1], "n": 3, "x": None}) == {"pass@1": 0.5, "n": 3, "x": None}
