"""The data sections of a report, in numbers by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.report.data_sections import funnels, judges
from tasks.store.manifest import Manifest


def manifest(stage: str, **numbers: Any) -> Manifest:
    return Manifest(stage, 1, "k", "d", 1, "", 1.0, {}, {}, {}, path=Path("/nowhere"), **numbers)


def rows(stage: str, counts: dict[str, int]) -> tuple[str, dict[str, int]]:
    (funnel,) = funnels({stage: manifest(stage, counts=counts)})
    return funnel["whole"], {row["name"]: row["count"] for row in funnel["rows"]}


PROBLEMS = {
    "source0_read": 100, "reasoning_held_out": 10, "general_held_out": 0, "decontamination_equal": 1,
    "decontamination_overlapping": 2, "test_gsm8k_problems": 50, "test_gsm8k_left_out": 7, "test_gsm8k_equal": 4,
    "test_gsm8k_overlapping": 5, "test_math_500_equal": 0, "test_math_500_overlapping": 1, "shared_with_held_out": 0,
    "reasoning_train": 70, "general_train": 0,
}  # fmt: skip


def test_problems_that_are_shared_with_test_sets_are_no_surplus() -> None:
    whole, found = rows("problems", PROBLEMS)
    assert whole == "100 read" and sum(found.values()) == 100
    assert (found["shared with the held-out"], found["shared with a test set"]) == (3, 10)
    assert found["held out beyond the maximum"] == 7
    assert not [name for name in found if "validation" in name]


def test_validation_problems_have_rows_of_their_own() -> None:
    counts = {"validation_equal": 1, "validation_overlapping": 1, "reasoning_validation": 4, "general_validation": 0}
    whole, found = rows("problems", {**PROBLEMS, **counts, "reasoning_train": 64})
    assert whole == "100 read" and sum(found.values()) == 100
    assert (found["validation, reasoning"], found["shared with validation"]) == (4, 2)
    # The stage does not count validation problems that it drops.
    assert found["held out beyond the maximum, or validation shared with others"] == 7


def test_held_out_everyday_prompts_are_not_among_those_read() -> None:
    counts = {"everyday_held_out_seen": 0, "general_held_out": 20}
    whole, found = rows("problems", {**PROBLEMS, **counts})
    assert whole == "120 read" and found["held out beyond the maximum"] == 7


def test_a_trajectory_of_r1_zero_counts_once() -> None:
    counts = {
        "trajectories_incorrect": 30, "trajectories_surplus": 10, "trajectories_chosen": 20, "rewritten_incorrect": 4,
        "contaminated": 1, "kept": 15,
    }  # fmt: skip
    whole, found = rows("cold_start_data", counts)
    assert whole == "60 sampled or written" and "trajectories chosen" not in found
    assert found["kept"] == 15 and sum(found.values()) == 60


def test_the_reward_models_of_every_round_are_reported() -> None:
    stages = ("sft_data", "reward_models", "alignment_rl", "reward_models_2", "process_reward_model")
    measured = {"helpful_held_out_accuracy": 0.75}
    found = judges({stage: manifest(stage, metrics=measured) for stage in stages})
    assert [row["stage"] for row in found] == ["sft_data", "reward_models", "reward_models_2"]
