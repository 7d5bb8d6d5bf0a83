"""Each filter of single samples on both sides of its boundary."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import ValidationError

from grpo.data.records import Sample
from grpo.errors import InputError
from grpo.rewards.text import repeated_ngram_share
from tasks.sft_data.filters import FILTERS, FilterSettings, reject

SETTINGS = FilterSettings(context=12, language_min=0.9, paragraph_max_words=5, repetition_ngram=2, repetition_max=0.5)
GOOD = Sample(
    problem_id="p",
    policy="policy",
    completion="one two three",
    reasoning="one two three four five",
    summary="six",
    answer="6",
    rewards={"format": 1.0, "accuracy": 1.0, "language": 1.0},
    tokens=9,
    finish_reason="stop",
    domain="reasoning",
    language="en",
)


def sample(**changes: Any) -> Sample:
    rewards = GOOD.rewards | changes.pop("rewards", {})
    return dataclasses.replace(GOOD, rewards=rewards, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"finish_reason": "length"}, "truncated"),
        ({"prompt_tokens": 3, "tokens": 9}, None),
        ({"prompt_tokens": 4, "tokens": 9}, "too_long"),
        ({"rewards": {"format": 0.99}}, "malformed"),
        ({"rewards": {"accuracy": 0.99}}, "incorrect"),
        ({"rewards": {"accuracy": 0.0}, "domain": "general"}, None),
        ({"rewards": {"language": 0.9}}, None),
        ({"rewards": {"language": 0.89}}, "mixed_language"),
        ({"reasoning": "1 2 3 4 5\n\n1 2 3 4 5\n \n1 2 3 4 5"}, None),
        ({"reasoning": "1 2 3 4 5\n6"}, "overlong_paragraph"),
        ({"reasoning": "一二三四五"}, None),
        ({"reasoning": "一二三四五六"}, "overlong_paragraph"),
        ({"reasoning": "use `x`"}, None),
        ({"reasoning": "```x"}, "code_in_reasoning"),
        ({"summary": "```x```"}, None),
        ({"completion": "a b a b a"}, None),  # ab ba ab ba: 2 of 4 occurred before
        ({"completion": "a b a b a b"}, "repetition"),  # 3 of 5
        ({"completion": ""}, None),
    ],
)
def test_both_sides_of_each_boundary(changes: dict[str, Any], reason: str | None) -> None:
    assert reject(sample(**changes), SETTINGS) == reason


def test_the_first_reason_counts() -> None:
    bad_in_all = sample(
        finish_reason="length",
        prompt_tokens=13,
        rewards={"format": 0.0, "accuracy": 0.0, "language": 0.0},
        reasoning="``` 1 2 3 4 5",
        completion="a a a a a",
    )
    assert all(is_bad(bad_in_all, SETTINGS) for is_bad in FILTERS.values())
    assert reject(bad_in_all, SETTINGS) == "truncated"
    assert reject(dataclasses.replace(bad_in_all, finish_reason="stop"), SETTINGS) == "too_long"


def test_general_samples_need_no_accuracy_and_others_are_told() -> None:
    rewards = {"format": 1.0, "language": 1.0}
    assert reject(dataclasses.replace(GOOD, rewards=rewards, domain="general"), SETTINGS) is None
    with pytest.raises(InputError, match=r"problem p has no reward 'accuracy' \(it has format, language\)"):
        reject(dataclasses.replace(GOOD, rewards=rewards), SETTINGS)


def test_repetition_is_counted_as_rewards_count_it() -> None:
    text = "<think> a, b, a, b, a, b </think>"  # eleven words and signs: ten pairs, four of them distinct
    assert repeated_ngram_share(text, 2) == pytest.approx(0.6)
    looping = dataclasses.replace(GOOD, completion=text)
    assert reject(looping, FilterSettings(repetition_ngram=2, repetition_max=0.59)) == "repetition"
    assert reject(looping, FilterSettings(repetition_ngram=2, repetition_max=0.61)) is None


def test_no_context_no_limit() -> None:
    assert reject(sample(prompt_tokens=10**9), FilterSettings()) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"language_min": 1.1},
        {"repetition_max": -0.1},
        {"paragraph_max": 5},
        {"context": 0},
        {"near_duplicate_jaccard": 0},
        {"pass_rate_min": 0.6, "pass_rate_max": 0.5},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FilterSettings(**wrong)
