"""A gate with a review: a person decides although nothing failed, and sees examples of the data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import ValidationError

from flows.recipe.load import load_recipe
from flows.run.gates import gatekeeper
from flows.run.gates.checks import check_gates
from flows.run.gates.gatekeeper import Answer, Gatekeeper, GateStopped
from flows.run.gates.review import review_samples
from flows.stage_graphs import GRAPHS
from grpo.data.records import Problem
from grpo.errors import InputError
from tasks.gates.approvals import Decision, Decisions
from tasks.gates.conditions import Gate, Verdict, decision_key
from tasks.sft_data.examples import example, write_examples
from tasks.store.manifest import Manifest, artifact_key
from tasks.store.store import Store


def publish(home: Path, completions: list[str]) -> Manifest:
    with Store(home).attempt("cold_start_data", artifact_key("cold_start_data", 1, {}, {})) as attempt:
        problems = [
            Problem(str(i), [{"role": "user", "content": f"{i}?"}], "", "none", "reasoning", "en", "x")
            for i in range(len(completions))
        ]
        rows = [{**example(p, c), "original": f"o{p.id}"} for p, c in zip(problems, completions, strict=True)]
        write_examples(attempt.out / "examples", rows)
        return attempt.publish(stage_version=1, config={})


def test_samples_are_evenly_spaced_and_cannot_leave_their_code_blocks(tmp_path: Path) -> None:
    manifest = publish(tmp_path, [f"```\n# Approved\n{i}" for i in range(10)])
    shown = review_samples(manifest, 3)  # rows 0, 3 and 6 of 10
    assert [text.splitlines()[0] for text in shown] == ["### Sample 1", "### Sample 2", "### Sample 3"]
    assert [f"original:\n\n```text\no{row}\n```" in text for text, row in zip(shown, (0, 3, 6), strict=True)] == [
        True
    ] * 3
    assert "completion:\n\n````text\n```\n# Approved\n0\n````" in shown[0]
    assert len(review_samples(manifest, 99)) == 10


def test_a_stage_without_examples_cannot_be_reviewed(tmp_path: Path) -> None:
    with Store(tmp_path).attempt("problems", artifact_key("problems", 1, {}, {})) as attempt:
        (attempt.out / "x").touch()
        manifest = attempt.publish(stage_version=1, config={})
    with pytest.raises(InputError, match="reviews samples of problems, which writes no examples"):
        review_samples(manifest, 3)


def test_a_gate_needs_conditions_or_a_review() -> None:
    with pytest.raises(ValidationError, match="neither conditions nor a review"):
        Gate(name="g", after="cold_start_data")
    gate = Gate(name="g", after="cold_start_data", review=2)
    assert check_gates([gate], GRAPHS["r1"](load_recipe("tiny")), ["g"]) == [gate]  # --approve may name it


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Reads a gate after an artifact, as a run in a process without a terminal or a server does; returns its status."""
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(gatekeeper, "keeps_runs", lambda: False)
    monkeypatch.setattr(gatekeeper.sys, "stdin", None)

    def read(gate: Gate, manifest: Manifest, *approve: str) -> str:
        results: list[dict[str, Any]] = []
        record: Any = SimpleNamespace(set_tags=lambda *_: None)
        recipe, run = load_recipe("tiny", []), Mock(side_effect=AssertionError)
        Gatekeeper([gate], recipe, record, "run", approve, lambda _: manifest, results.append, run).after(gate.after)
        return str(results[0]["status"])

    return read


def kept(manifest: Manifest, count: int) -> Manifest:
    return dataclasses.replace(manifest, counts={"kept": count})


def gate(on_failure: str, review: int | None) -> Gate:
    conditions: Any = [{"metric": "kept", "above": 500}]
    return Gate(name="g", after="cold_start_data", conditions=conditions, review=review, on_failure=on_failure)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("on_failure", "count", "said"),
    [
        ("stop", 990, "asks for a review of 2 samples; it needs approval"),
        ("warn", 990, "asks for a review of 2 samples; it needs approval"),
        ("warn", 3, "kept of cold_start_data is 3; must be above 500; it needs approval"),
        ("ask", 3, "kept of cold_start_data is 3; must be above 500; it needs approval"),
        ("stop", 3, "kept of cold_start_data is 3; must be above 500$"),
    ],
)
def test_a_person_reviews_whether_the_conditions_hold_or_not(
    read: Any, tmp_path: Path, on_failure: str, count: int, said: str
) -> None:
    made = kept(publish(tmp_path, ["a", "b"]), count)
    with pytest.raises(GateStopped, match=said):
        read(gate(on_failure, review=2), made)
    assert read(gate(on_failure, review=None), kept(made, 990)) == "passed"
    assert on_failure != "warn" or read(gate(on_failure, review=None), kept(made, 3)) == "warned"


def test_an_approval_is_of_the_evidence_and_not_of_the_key(read: Any, tmp_path: Path) -> None:
    asks, made = gate("ask", review=None), publish(tmp_path, ["a", "b"])
    assert read(asks, kept(made, 90), "g") == read(asks, kept(made, 90)) == "approved"
    with pytest.raises(GateStopped, match="kept of cold_start_data is 3; must be above 500; it needs approval"):
        read(asks, kept(made, 3))
    assert read(asks, kept(made, 3), "g") == read(asks, kept(made, 3)) == read(asks, kept(made, 90)) == "approved"


def test_other_data_under_a_reviewed_key_are_reviewed_again(read: Any, tmp_path: Path) -> None:
    review = Gate(name="g", after="cold_start_data", review=2)
    first, again, other = (
        publish(tmp_path / home, ["a", middle, "c", "d"])  # rows 0 and 2 are shown
        for home, middle in (("first", "b"), ("again", "b"), ("other", "B"))
    )
    assert review_samples(first, 2) == review_samples(other, 2) and first.key == other.key
    assert read(review, first, "g") == read(review, first) == read(review, again) == "approved"
    with pytest.raises(GateStopped, match="asks for a review of 2 samples; it needs approval"):
        read(review, other)


def test_a_review_that_an_earlier_version_recorded_is_asked_again(read: Any, tmp_path: Path) -> None:
    review, made = Gate(name="g", after="cold_start_data", review=2), publish(tmp_path, ["a", "b"])
    earlier = Verdict("g", "cold_start_data", (), review_samples(made, 2)).digest()  # says nothing of the other rows
    key = decision_key(review, {"cold_start_data": made.key})
    Decisions(tmp_path / "home").add(key, Decision.now("g", True, "ada", "", earlier))
    with pytest.raises(GateStopped, match="it needs approval"):
        read(review, made)


def test_the_question_in_prefect_is_another_for_other_evidence(
    read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect gives the answer to a pause key again when a suspended run goes on, which may have made its data anew."""
    keys: list[str] = []

    def ask(gate: Gate, verdict: Verdict, pause_key: str) -> Answer:
        keys.append(pause_key)
        raise GateStopped("suspended", gate.name)

    monkeypatch.setattr(gatekeeper, "keeps_runs", lambda: True)
    monkeypatch.setattr(gatekeeper, "_publish", lambda *_: None)
    monkeypatch.setattr(gatekeeper, "_ask_in_prefect", ask)
    made = publish(tmp_path, ["a", "b"])
    for count in (90, 90, 3):
        with pytest.raises(GateStopped, match="suspended"):
            read(gate("ask", review=None), kept(made, count))
    assert keys[0] == keys[1] != keys[2]


def test_samples_are_a_part_of_the_evidence_and_not_of_other_gates_keys() -> None:
    verdict = Verdict("g", "cold_start_data", (), ("### Sample 1",))
    assert verdict.passed and verdict.digest() != Verdict("g", "cold_start_data", ()).digest()
    assert verdict.markdown() == "## Gate g after cold_start_data: to be reviewed\n\n\n### Sample 1"
    condition: Any = {"metric": "kept", "above": 1}
    assert "review" not in Gate(name="g", after="x", conditions=[condition]).model_dump()
    keys = {decision_key(Gate(name="g", after="x", conditions=[condition], review=n), {}) for n in (None, 3)}
    assert len(keys) == 2
