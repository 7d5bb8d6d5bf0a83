"""The miniature world: its sums are right, its habits are what they say, its text is fit for what reads it."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from pydantic import ValidationError

from grpo.errors import InputError
from grpo.rewards.language import language_consistency
from grpo.rewards.verifiers import verify
from tasks.problems.miniature.corpus import SUM_SHARE, corpus
from tasks.problems.miniature.sums import (
    HIGHEST,
    SumsSource,
    expression_of,
    load_sums,
    long_sums,
    random_sum,
    reaches_another_ten,
    step,
)
from tasks.problems.miniature.writers import Habits, demonstrate, sum_reasoning
from tasks.problems.normal_form import long_calculations
from tasks.sft_data.cold_start import miniature_writer, sampled, solution, written
from tasks.sft_data.filters import FilterSettings

GOOD = Habits(mixes_languages=0, slips=0, answers=1, courteous=1, refuses=1)


def test_a_sum_worked_out() -> None:
    reasoning, answer = sum_reasoning("17 + (4 + 8 - 2) - 6", "en", GOOD, random.Random(0))
    assert (
        reasoning == ("first 17 + (12 - 2) - 6\nthen 17 + 10 - 6\nthen 27 - 6\nthen 21\nso the result is 21")
        and answer == "21"
    )


def test_without_slips_every_sum_is_right() -> None:
    rng = random.Random(1)
    for _ in range(300):
        expression, value = random_sum(rng, rng.randint(2, 7))
        reasoning, answer = sum_reasoning(expression, "de", GOOD.model_copy(update={"mixes_languages": 0.5}), rng)
        assert 0 <= int(answer) == value == eval(expression) <= HIGHEST
        assert reasoning.endswith(answer)
        for line in re.findall(r"(?:first|then|zuerst|dann) (.+)", reasoning):
            assert eval(line) == eval(expression)


@pytest.mark.parametrize(
    ("expression", "right", "slipped"),
    [
        ("17 + 5", "22", "12"),
        ("32 - 5", "27", "17"),
        ("3 + (4 + 8)", "3 + 12", "3 + 2"),
        ("(19 + 2 - 6) + 1", "(21 - 6) + 1", "(11 - 6) + 1"),
        ("12 - 5", "7", "7"),  # no ten to lose
        ("11 + 5 - 9", "16 - 9", "16 - 9"),  # the same ten
        ("-3 + 15", "12", "2"),
        ("3 - -9", "12", "2"),
    ],
)
def test_a_slip_loses_a_ten(expression: str, right: str, slipped: str) -> None:
    assert (step(expression), step(expression, loses_ten=True)) == (right, slipped)
    habits = GOOD.model_copy(update={"slips": 1.0})
    assert sum_reasoning(expression, "en", habits, random.Random(0))[0].startswith(f"first {slipped}\n")


@pytest.mark.parametrize("expression", ["7", "3 - (4)", "3 -4", "1 2 + 3"])
def test_what_is_no_sum_is_one_line(expression: str) -> None:
    with pytest.raises(InputError, match="is no sum of numbers and brackets"):
        step(expression)


def test_sums_are_as_long_as_asked_and_often_reach_another_ten() -> None:
    rng = random.Random(2)
    reached = operations = brackets = 0
    for terms in [2, 3, 4, 5, 6, 7] * 200:
        left, value = random_sum(rng, terms)
        assert len(re.findall(r"\d+", left)) == terms and left.count("(") <= 2
        brackets += "(" in left
        while " " in left:
            operations += 1
            reached += step(left) != step(left, loses_ten=True)
            left = step(left)
        assert int(left) == value
    assert 0.35 < reached / operations < 0.55 and 0.3 < brackets / 1200 < 0.9
    assert reaches_another_ten(17, 22) and not reaches_another_ten(12, 7)


def test_sums_as_problems() -> None:
    source = SumsSource(count=200, min_terms=4, max_terms=5)
    problems = load_sums(source, 1).problems
    assert problems == load_sums(source, 1).problems != load_sums(source, 2).problems
    assert {p.language for p in problems[:2]} == {"en", "de"} and len({p.text for p in problems}) == len(problems)
    for problem in problems:
        assert verify(problem, str(eval(expression_of(problem)))) == 1.0
    counts = load_sums(SumsSource(count=2000, min_terms=2, max_terms=2), 1).counts
    assert counts["read"] == 2000 == counts["kept"] + counts["duplicates"] and counts["duplicates"] > 0
    with pytest.raises(ValidationError, match=r"min_terms \(5\) is above max_terms \(3\)"):
        SumsSource(count=2, min_terms=5, max_terms=3)


def test_language_of_the_writers() -> None:
    rng = random.Random(0)
    for language in ("en", "de"):
        assert language_consistency(sum_reasoning("1 + 2 + 3", language, GOOD, rng)[0], language) == 1.0
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
    assert [*long_sums(text)] == [*long_calculations(text)]


def test_expression_of(problem: Any) -> None:
    assert expression_of(problem(text="berechne 4 - 1 + 7")) == "4 - 1 + 7"
    assert expression_of(problem(text="what is (4 - 1) + -7 (a sum) of 2")) == "(4 - 1) + -7"
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
    carrying = [problem(str(i), f"compute {i} + 9", str(i + 9)) for i in range(1, 10)]
    assert written(carrying, miniature_writer(slipping, 0), FilterSettings())[1] == {"incorrect": 9}


def test_worked_solutions(problem: Any) -> None:
    known = problem(metadata={"solution": "1 + 2 = 3"})
    assert solution(known) == ("1 + 2 = 3", "3")
    with pytest.raises(InputError, match="no worked solution"):
        solution(problem())
    general = {"domain": "general", "answer": "", "verifier": "none"}
    replied = problem(**general, metadata={"solution": "they greet", "reference": "good morning"})
    assert solution(replied) == ("they greet", "good morning")
    with pytest.raises(InputError, match="no reference"):
        solution(problem(**general, metadata={"solution": "they greet"}))


def test_sampled_demonstrations_keep_the_first_good_one(problem: Any, sample: Any) -> None:
    samples = [sample(accuracy=0.0), sample(reasoning="good one"), sample(reasoning="another")]
    examples, counts = sampled([problem()], samples, FilterSettings())
    assert counts == {"incorrect": 1, "kept": 1, "surplus": 1}
    assert "good one" in examples[0]["completion"]
