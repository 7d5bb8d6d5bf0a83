"""Normal forms, and that what is trained on shares none with what is held out."""

from __future__ import annotations

import random

import pytest

from flows.recipe.load import load_recipe
from grpo.errors import InputError
from tasks.problems.decontaminate import HeldOut
from tasks.problems.load import load, split
from tasks.problems.miniature.corpus import LEFT_OUT, corpus, held_out_sums, is_left_out
from tasks.problems.miniature.sums import SumsSource, load_sums
from tasks.problems.miniature.writers import demonstrate
from tasks.problems.normal_form import HELD_OUT, long_calculations, normal_form, place
from tasks.problems.sources import ReasoningGymSource


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("compute 4 - 1 + 7", "4-1+7"),
        ("berechne 17 + (4 + 8) - 6", "17+(4+8)-6"),
        ("Berechne  4 \u2212 1 + 7 !", "4-1+7"),
        ("State the final answer to the following arithmetic problem: 4 - 1 + 7 =", "4-1+7"),
        ("  Tell me\nMORE ", "tell me more"),
        ("is 1 + 2 more than 2 + 2", "is 1 + 2 more than 2 + 2"),  # two calculations
        ("x + 1 = 7", "x + 1 = 7"),
        ("one " * 13 + "1 + 2", "one " * 13 + "1 + 2"),  # too many words: a word problem
    ],
)
def test_normal_form(text: str, form: str) -> None:
    assert normal_form(text) == form


def test_facts_are_no_long_calculations() -> None:
    assert [*long_calculations("first 3 + 4\nthen -4 + 7 - 1 = 2\nthen 7")] == ["-4+7-1"]


def test_a_sum_is_on_one_side_in_every_language() -> None:
    asked = {"family": "chain_sum", "count": 300, "parameters": {"max_terms": 5, "max_digits": 1}}
    prompts = ("compute {expression}", "berechne {expression}")
    english, german = (load(ReasoningGymSource(**asked, prompt=prompt), 0).problems for prompt in prompts)
    assert [normal_form(p.text) for p in english] == [normal_form(p.text) for p in german]
    train, held_out = split([*english, *german], 0.15, HELD_OUT)
    assert train and len(held_out) > 50
    assert not {normal_form(p.text) for p in train} & {normal_form(p.text) for p in held_out}


def test_nothing_that_tiny_trains_on_shares_a_problem_with_its_evaluation() -> None:
    recipe = load_recipe("tiny", [])
    problems = [p for s in recipe.problems.sources if isinstance(s, SumsSource) for p in load_sums(s, 0).problems]
    train, held_out = split(problems, recipe.problems.held_out_share, HELD_OUT)
    forms = {normal_form(problem.text) for problem in held_out}
    assert len(forms) > 100 and not forms & {normal_form(problem.text) for problem in train}
    text = corpus(3000, 0, recipe.base.tagged_share)
    assert not forms & {*long_calculations(text)} and held_out_sums(text) == 0
    assert all(is_left_out(problem.text) for problem in held_out)  # so the count above can fail
    assert recipe.cold_start_data.habits is not None
    rng, index = random.Random(0), HeldOut(held_out)
    demonstrations = [demonstrate(problem, recipe.cold_start_data.habits, rng)[0] for problem in train[:300]]
    shared = [index.match_passage(text) for text in demonstrations]
    assert sum(match is not None for match in shared) <= 3  # by chance, in a line of the work; the stage drops these


def test_a_recipe_holds_out_no_more_than_the_text_leaves_out() -> None:
    assert 0 <= place("4-1+7") < 1
    with pytest.raises(InputError, match="problems.held_out_share is 0.3, but the text of base.pretrain leaves out"):
        load_recipe("tiny", ["problems.held_out_share=0.3"])
    assert load_recipe("tiny", [f"problems.held_out_share={LEFT_OUT}"]).problems.held_out_share == LEFT_OUT
