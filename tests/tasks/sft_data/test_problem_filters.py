"""Filters of whole problems, on both sides of each boundary."""

from __future__ import annotations

from typing import Any

import pytest

from grpo.errors import InputError
from tasks.problems.decontaminate import HeldOut
from tasks.sft_data.filters import FilterSettings
from tasks.sft_data.problem_filters import PROBLEM_FILTERS, ProblemSamples, pass_rate, reject_problem

BOUNDS = FilterSettings(pass_rate_min=0.25, pass_rate_max=0.75, pass_rate_samples=4)


def rated(sample: Any, problem: Any, right: int, wrong: int) -> ProblemSamples:
    return ProblemSamples(problem(), [sample(accuracy=1.0)] * right + [sample(accuracy=0.9)] * wrong)


@pytest.mark.parametrize(
    ("right", "wrong", "reason"),
    [
        (3, 1, None),  # 0.75, the bound
        (4, 1, "too_easy"),  # 0.8
        (1, 3, None),  # 0.25, the bound
        (1, 4, "too_hard"),  # 0.2
        (3, 0, None),  # three samples say nothing
        (4, 0, "too_easy"),
        (0, 3, None),
        (0, 4, "too_hard"),
    ],
)
def test_pass_rates(sample: Any, problem: Any, right: int, wrong: int, reason: str | None) -> None:
    assert reject_problem(rated(sample, problem, right, wrong), BOUNDS) == reason
    assert reject_problem(rated(sample, problem, right, wrong), FilterSettings()) is None  # no bounds by default


def test_the_pass_rate_counts_all_samples_whatever_else_is_wrong(sample: Any, problem: Any) -> None:
    samples = [sample(finish_reason="length"), sample(accuracy=0.0), sample(reasoning="```"), sample(accuracy=0.0)]
    assert pass_rate(ProblemSamples(problem(), samples)) == 0.5


def test_general_prompts_have_no_pass_rate(sample: Any, problem: Any) -> None:
    assert reject_problem(ProblemSamples(problem(domain="general"), [sample(accuracy=None)] * 4), BOUNDS) is None
    with pytest.raises(InputError, match="has no reward 'accuracy'"):
        reject_problem(ProblemSamples(problem(), [sample(accuracy=None)] * 4), BOUNDS)


def test_a_leak(sample: Any, problem: Any) -> None:
    leak = ProblemSamples(problem(text="compute 1 + 2\nAnswer: 3"), [sample()])
    assert reject_problem(leak, FilterSettings()) == "leaked"
    assert reject_problem(leak, FilterSettings(leaks=False)) is None
    assert (
        reject_problem(ProblemSamples(problem(text="compute 1 + 2\nAnswer: 4"), [sample()]), FilterSettings()) is None
    )


def test_a_held_out_prompt(sample: Any, problem: Any) -> None:
    held_out = HeldOut([problem("h", text="one two three four five six")], n=5)
    shared = problem(text="so one two three four five")
    assert reject_problem(ProblemSamples(shared, [sample()], held_out), FilterSettings()) == "contaminated"
    assert (
        reject_problem(ProblemSamples(problem(text="one two three four 5"), [sample()], held_out), FilterSettings())
        is None
    )
    assert reject_problem(ProblemSamples(shared, [sample()]), FilterSettings()) is None  # nothing is held out


def test_the_first_reason_counts(sample: Any, problem: Any) -> None:
    held_out = HeldOut([problem("h", text="Answer: 3")])
    bad = ProblemSamples(problem(text="Answer: 3"), [sample()] * 4, held_out)
    found = [name for name, is_bad in PROBLEM_FILTERS.items() if is_bad(bad, BOUNDS)]
    assert found == ["too_easy", "leaked", "contaminated"] and reject_problem(bad, BOUNDS) == "too_easy"
