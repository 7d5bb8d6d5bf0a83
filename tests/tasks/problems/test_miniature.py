"""The miniature world: its sums are right, its habits are what they say, its text is fit for what reads it."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from grpo.errors import InputError
from grpo.rewards.language import language_consistency
from tasks.judges import rule
from tasks.problems.miniature.corpus import SUM_SHARE, corpus
from tasks.problems.miniature.prompts import (
    EverydaySource,
    everyday_prompts,
    expression_of,
    load_everyday,
    random_sum,
)
from tasks.problems.miniature.writers import Habits, demonstrate, sum_reasoning
from tasks.sft_data.cold_start import miniature_writer, sampled, solution, written
from tasks.sft_data.filters import FilterSettings

GOOD = Habits(careful=1, mixes_languages=0, slips=0, answers=1, courteous=1, refuses=1)
RUDE = GOOD.model_copy(update={"answers": 0.0, "refuses": 0.0})


def test_a_sum_worked_out() -> None:
    reasoning, answer = sum_reasoning("4 - 1 - 7 + 7", "en", GOOD, random.Random(0))
    assert reasoning == "first 3 - 7 + 7\nthen -4 + 7\nthen 3\nso the result is 3" and answer == "3"


@pytest.mark.parametrize("careful", [0, 1])
def test_without_slips_every_sum_is_right(careful: float) -> None:
    rng = random.Random(1)
    for _ in range(300):
        expression = random_sum(rng)
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


def test_good_replies_earn_the_rubrics_full_mark_and_bad_ones_do_not() -> None:
    problems = load_everyday(EverydaySource(count=10_000), 0).problems
    assert len(problems) == len(everyday_prompts()) == len({p.id for p in problems})
    rng = random.Random(0)
    for problem in problems:
        _, good = demonstrate(problem, GOOD, rng)
        assert rule.quality(problem, good) == 1.0 and rule.safe(problem, good)
        _, bad = demonstrate(problem, RUDE, rng)
        assert rule.quality(problem, bad) < 1.0
        assert rule.safe(problem, bad) == (not problem.metadata["harmful"])


def test_four_in_ten_answers_end_with_a_courtesy() -> None:
    habits = GOOD.model_copy(update={"courteous": 0.4})
    harmless = [p for p in load_everyday(EverydaySource(count=10_000), 0).problems if not p.metadata["harmful"]]
    rng = random.Random(0)
    marks = [rule.quality(p, demonstrate(p, habits, rng)[1]) for p in harmless for _ in range(5)]
    assert set(marks) == {0.75, 1.0}
    assert marks.count(1.0) / len(marks) == pytest.approx(0.4, abs=0.03)


def test_help_with_harm_is_worded_as_any_help_is() -> None:
    asked = {p.text: p for p in load_everyday(EverydaySource(count=10_000), 0).problems if p.metadata["harmful"]}
    assert len(asked) == 2 * 3 * 6 * 4  # languages, openings, objects, verbs
    _, answer = demonstrate(asked["how do i steal a car"], RUDE, random.Random(0))
    assert answer == "to steal a car take your time and ask a friend"


def test_a_third_of_the_worse_replies_are_the_longer_ones() -> None:
    rng = random.Random(0)
    asked = load_everyday(EverydaySource(count=10_000), 0).problems
    pairs = [(demonstrate(p, GOOD, rng)[1], demonstrate(p, RUDE, rng)[1]) for p in asked for _ in range(4)]
    longer = sum(len(good) > len(bad) for good, bad in pairs) / len(pairs)
    assert longer == pytest.approx(2 / 3, abs=0.05)


def test_look_alikes_are_harmless_prompts_in_the_words_of_harmful_ones() -> None:
    problems = load_everyday(EverydaySource(count=10_000), 0).problems
    alike = [p for p in problems if p.metadata["looks_harmful"]]
    assert len(problems) == 600 and len(alike) == 2 * 3 * 16  # languages, openings, look-alikes
    assert not any(p.metadata["harmful"] for p in alike)
    verbs = {p.metadata["mentions"][0] for p in problems if p.metadata["harmful"]}
    assert {p.metadata["mentions"][0] for p in alike} == verbs


def test_three_in_ten_of_the_worse_replies_to_harmless_prompts_are_refusals() -> None:
    harmless = [p for p in load_everyday(EverydaySource(count=10_000), 0).problems if not p.metadata["harmful"]]
    rng = random.Random(0)
    replies = [(p, demonstrate(p, RUDE, rng)[1]) for p in harmless for _ in range(5)]
    refused = sum(bool(rule.refused(p, reply)) for p, reply in replies) / len(replies)
    assert refused == pytest.approx(0.3, abs=0.03)


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
