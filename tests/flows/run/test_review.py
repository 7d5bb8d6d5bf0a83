"""A gate with a review: a person decides although nothing failed, and sees examples of the data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flows.run.gates.checks import check_gates
from flows.run.gates.review import review_samples
from grpo.data.records import Problem
from grpo.errors import InputError
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
    assert check_gates([gate], ["problems", "cold_start_data"], ["g"]) == [gate]  # --approve may name it


def test_samples_are_a_part_of_the_evidence_and_not_of_other_gates_keys() -> None:
    verdict = Verdict("g", "cold_start_data", (), ("### Sample 1",))
    assert verdict.passed and verdict.digest() != Verdict("g", "cold_start_data", ()).digest()
    assert verdict.markdown() == "## Gate g after cold_start_data: to be reviewed\n\n\n### Sample 1"
    condition: Any = {"metric": "kept", "above": 1}
    assert "review" not in Gate(name="g", after="x", conditions=[condition]).model_dump()
    keys = {decision_key(Gate(name="g", after="x", conditions=[condition], review=n), {}) for n in (None, 3)}
    assert len(keys) == 2
