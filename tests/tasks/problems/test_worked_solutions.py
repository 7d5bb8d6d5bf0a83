"""Worked solutions of reasoning-gym's families end in the answer and can be checked line by line."""

from __future__ import annotations

import ast

import pytest
from pydantic import ValidationError

from tasks.problems.reasoning_gym import generate
from tasks.problems.sources import ReasoningGymSource
from tasks.problems.worked_solutions import WRITERS


def test_they_say_each_step() -> None:
    chain = {"expression": "14 + 5 - 30"}
    assert WRITERS["chain_sum"](chain) == "14 + 5 = 19\n19 - 30 = -11"
    assert WRITERS["chain_sum"]({"expression": "-7"}) == "-7"
    assert WRITERS["products"]({"expression": "3 * 4 * 5"}) == "3 * 4 = 12\n12 * 5 = 60"
    legs = {"animals": {"lobster": 2, "cow": 1, "bee": 3}}
    assert (
        WRITERS["leg_counting"](legs)
        == "lobster: 2 * 10 = 20\ncow: 1 * 4 = 4\n20 + 4 = 24\nbee: 3 * 6 = 18\n24 + 18 = 42"
    )
    numbers = {"operation": "remove_smaller", "filter_value": "20", "original_numbers": ["31", "20", "7"]}
    assert WRITERS["number_filtering"](numbers).splitlines() == [
        "31 is not smaller than 20, keep",
        "20 is not smaller than 20, keep",
        "7 is smaller than 20, remove",
    ]


@pytest.mark.parametrize("family", WRITERS)
def test_the_last_line_leads_to_the_answer(family: str) -> None:
    for problem in generate(ReasoningGymSource(family=family, count=50, worked_solutions=True), seed=0):
        lines = problem.metadata["solution"].splitlines()
        if family == "number_filtering":
            kept = [line.split()[0] for line in lines if line.endswith(", keep")]
            assert kept == ast.literal_eval(problem.answer)
        else:
            assert lines[-1].split(" = ")[-1] == problem.answer


def test_they_are_written_only_where_asked_for() -> None:
    problem = next(generate(ReasoningGymSource(family="chain_sum", count=1), seed=0))
    assert "solution" not in problem.metadata


def test_other_families_have_none() -> None:
    with pytest.raises(ValidationError, match="no worked solutions are written for rush_hour; known are chain_sum"):
        ReasoningGymSource(family="rush_hour", count=1, worked_solutions=True)
