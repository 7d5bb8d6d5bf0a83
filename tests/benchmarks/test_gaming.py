"""Rules accept no case of the gaming data set, and every honest answer beside them."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.gaming_cases import Case, cases
from grpo.rewards.verifiers import verify

CASES = cases()
RULES = {"exact", "number", "math", "choice"}


def named(case: Case) -> str:
    return f"{case.problem.id} {case.kind}"


@pytest.mark.parametrize("case", [case for case in CASES if not case.honest], ids=named)
def test_no_gaming_is_accepted(case: Case) -> None:
    assert verify(case.problem, case.answer) == 0.0, case.completion


@pytest.mark.parametrize("case", [case for case in CASES if case.honest], ids=named)
def test_every_honest_answer_is_accepted(case: Case) -> None:
    assert verify(case.problem, case.answer) == 1.0, case.completion


def test_the_data_set_is_as_large_and_varied_as_it_says() -> None:
    kinds = Counter(case.kind for case in CASES)
    assert sum(kinds.values()) - kinds["honest"] >= 200 and kinds["honest"] >= 100
    assert len(kinds) == 15 and min(kinds.values()) >= 5, kinds
    for rule in RULES:
        assert {True, False} == {case.honest for case in CASES if case.problem.verifier == rule}
