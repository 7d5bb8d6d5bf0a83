"""Rubrics: read strictly, and scored by hand."""

from __future__ import annotations

from typing import Any

import pytest

from grpo.errors import InputError
from grpo.rewards.rubric import Criterion, read_rubric, rubric_score

RUBRIC = [Criterion("a", 3), Criterion("b", 1), Criterion("c", -2)]


def test_criteria_are_texts_or_have_weights() -> None:
    assert read_rubric({}) == read_rubric({"rubric": None}) == []
    given = ["a ", {"criterion": "b"}, {"criterion": "c", "weight": -0.5}]
    assert read_rubric({"rubric": given}) == [("a", 1.0), ("b", 1.0), ("c", -0.5)]
    filled = [{"criterion": "a", "weight": None, "tags": None}, {"criterion": "b", "weight": 2.0}]  # by parquet
    assert read_rubric({"rubric": filled}) == [("a", 1.0), ("b", 2.0)]


@pytest.mark.parametrize(
    ("fulfilled", "score"),
    [
        ([True, True, False], 1.0),
        ([True, False, False], 0.75),
        ([False, True, True], 0.0),  # 1 - 2, which is less than nothing
        ([True, True, True], 0.5),
        ([True, None, None], 0.25),  # what is undecided counts against the response: 3 - 2 of 4
        ([None, None, None], 0.0),
    ],
)
def test_the_score_is_the_weighted_share(fulfilled: list[bool | None], score: float) -> None:
    assert rubric_score(RUBRIC, fulfilled) == score


@pytest.mark.parametrize(
    ("rubric", "message"),
    [
        ([], "a list of at least one criterion is needed"),
        ("be kind", 'a list of at least one criterion is needed, got "be kind"'),
        ([" "], "criterion 0 must be a text or"),
        (["a", {"text": "b"}], "criterion 1 must be a text or"),
        ([{"criterion": "a", "wieght": 2}], "criterion 0 must be a text or"),
        ([{"criterion": "a", "weight": 0}], "criterion 0: weight 0 must be a number other than 0"),
        ([{"criterion": "a", "weight": True}], "weight true must be a number"),
        ([{"criterion": "a", "weight": float("nan")}], "weight NaN must be a number"),
        ([{"criterion": "a", "weight": -1}], "no criterion has a positive weight"),
    ],
)
def test_a_malformed_rubric_is_said(rubric: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_rubric({"rubric": rubric})
