"""The miniature world: its sums are right, its habits are what they say, its text is fit for what reads it."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from grpo.errors import InputError
from grpo.rewards.language import language_consistency
from tasks.problems.miniature.corpus import SUM_SHARE, corpus
from tasks.problems.miniature.prompts import (
    expression_of,
    random_sum,
)
from tasks.problems.miniature.writers import Habits, demonstrate, sum_reasoning
from tasks.sft_data.cold_start import miniature_writer, sampled, solution, written
from tasks.sft_data.filters import FilterSettings

GOOD = Habits(careful=1, mixes_languages=0, slips=0, answers=1, courteous=1, refuses=1)


def test_a_sum_worked_out() -> None:
    reasoning, answer = sum_reasoning("4 - 1 - 7 + 7", "en", GOOD, random.Random(0))
    assert reasoning == "first 3 - 7 + 7\nthen -4 + 7\nthen 3\nso the result is 3" and answer == "3"


@pytest.mark.parametrize("careful", [0, 1])
def test_without_slips_every_sum_is_right(careful: float) -> None:
    rng = random.Random(1)
    for _ in range(300):
        expression = random_sum(rng, (2, 5))
        habits = GOOD.model_copy(update={"careful": careful, "mixes_languages": 0.5})
        reasoning, answer = sum_reasoning(expression, "de", habits, rng)
        assert int(answer) == eval(expression)
        assert reasoning.endswith(answer)
        for line in re.findall(r"(?:first|then|zuerst|dann) (.+)", reasoning):
            assert eval(line) == eval(expression)


def test_slips_change_the_result_by_one_each() -> None:
    habits = GOOD.model_copy(update={"slips": 1.0})
    for seed in range(50):
        _, answer = sum_reasoning("1 + 2", "en", habits, random.Random(seed))
        assert int(answer) in (2, 4)


def test_language_of_the_writers() -> None:
    rng = random.Random(0)
    for language in ("en", "de"):
        for careful in (0, 1):
            habits = GOOD.model_copy(update={"careful": careful})
            assert language_consistency(sum_reasoning("1 + 2 + 3", language, habits, rng)[0], language) == 1.0
    mixed = GOOD.model_copy(update={"mixes_languages": 1.0})
    texts = [sum_reasoning("1 + 2 + 3 + 4", "en", mixed, rng)[0] for _ in range(50)]
    assert sum(language_consistency(text, "en") < 1 for text in texts) > 30


def test_the_corpus_is_reproducible_and_rarely_tagged() -> None:
    text = corpus(2000, seed=3, tagged_share=0.04)
    assert text == corpus(2000, seed=3, tagged_share=0.04) != corpus(2000, seed=4, tagged_share=0.04)
    documents = text.split("\n\n")
    assert len(documents) == 2000 and all(documents)
    assert 0 < sum("<answer>" in d for d in documents) / 2000 < 0.04
    sums = sum(bool(re.search(r"\d", d)) for d in documents) / 2000
    assert sums == pytest.approx(SUM_SHARE, abs=0.03)


def test_expression_of(problem: Any) -> None:
    assert expression_of(problem(text="berechne 4 - 1 + 7")) == "4 - 1 + 7"
    with pytest.raises(InputError, match="asks for no sum"):
        expression_of(problem(text="hello"))
    with pytest.raises(InputError, match="unknown to the miniature"):
        demonstrate(problem(text="hello", domain="general"), GOOD, random.Random(0))


def test_written_demonstrations_pass_the_same_filters(problem: Any) -> None:
    asked = [problem(str(i), f"compute {i} + 1", str(i + 1)) for i in range(9)]
    examples, counts = written(asked, miniature_writer(GOOD, 0), FilterSettings())
    assert counts == {"kept": 9} and examples[2]["completion"] == (
        "<think>\nfirst 3\nso the result is 3\n</think>\n<answer>3</answer>"
    )
    slipping = GOOD.model_copy(update={"slips": 1.0})
    assert written(asked, miniature_writer(slipping, 0), FilterSettings())[1] == {"incorrect": 9}


def test_worked_solutions(problem: Any) -> None:
    known = problem(metadata={"solution": "1 + 2 = 3"})
    assert solution(known) == ("1 + 2 = 3", "3")
    with pytest.raises(InputError, match="no worked solution"):
        solution(problem())


def test_sampled_demonstrations_keep_the_first_good_one(problem: Any, sample: Any) -> None:
    samples = [sample(accuracy=0.0), sample(reasoning="good one"), sample(reasoning="another")]
    examples, counts = sampled([problem()], samples, FilterSettings())
    assert counts == {"incorrect": 1, "kept": 1, "surplus": 1}
    assert "good one" in examples[0]["completion"]
