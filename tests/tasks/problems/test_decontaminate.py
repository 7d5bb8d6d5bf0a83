"""Collisions, on prompts whose tokens can be counted by hand."""

from __future__ import annotations

import unicodedata

import pytest

from grpo.data.records import Problem
from grpo.errors import InputError
from tasks.problems.decontaminate import Collision, HeldOut, Match, decontaminate, tokens
from tasks.problems.load import load, split
from tasks.problems.sources import ReasoningGymSource


def problem(id: str, text: str) -> Problem:
    return Problem(id, [{"role": "user", "content": text}], "1", "exact", "reasoning", "en", "test")


def outcome(train: str, held_out: str, n: int = 10) -> str:
    counts = decontaminate([problem("t", train)], [problem("h", held_out)], n)[1]
    assert counts["train"] == 1 == counts["kept"] + counts["equal"] + counts["overlapping"]
    return next(name for name in ("kept", "equal", "overlapping") if counts[name])


def test_tokens() -> None:
    assert tokens("What is 3.5 + 2x? (A_b)") == ("what", "is", "3.5", "+", "2", "x", "a", "b")
    assert tokens("计算 x=1。") == ("计", "算", "x", "=", "1")


TEN = "a b c d e f g h i j"


@pytest.mark.parametrize(
    ("train", "held_out", "expected"),
    [
        (f"x {TEN} y", f"p q {TEN} r", "overlapping"),  # ten words in a row
        ("x a b c d e f g h i y", f"p q {TEN} r", "kept"),  # nine
        ("a b c d e x f g h i j", TEN, "kept"),  # ten words, not in a row
        (f"X, {TEN.upper()}!", f"{TEN} y", "overlapping"),  # case and punctuation do not count
        (TEN, TEN, "equal"),
        ("3 + 4 = ?", "3 + 4 =", "equal"),  # short prompts: all tokens
        ("3 + 4 =", "3 - 4 =", "kept"),  # operators are tokens
        ("3 + 4 =", "3 + 4 = 7", "equal"),  # the same calculation
        ("was ist 3 + 4 - 5?", "compute 3 + 4 \u2212 5", "equal"),  # in another language and spelling
        ("compute 4 + 3 - 5", "compute 3 + 4 - 5", "kept"),  # of another order: another problem
        ("x y 3 z", "x y 3", "kept"),  # short and contained, not equal
        ("3.5", "3 5", "kept"),
    ],
)
def test_one_against_one(train: str, held_out: str, expected: str) -> None:
    assert outcome(train, held_out) == expected


def test_an_accent_may_be_a_character_of_its_own() -> None:
    ten = "é è ê ë á à â ä ó ò"
    apart = unicodedata.normalize("NFD", ten)
    assert len(apart) == len(ten) + 10 and tokens(apart) == tokens(ten) == tuple(ten.split())
    for held_out, text in ((ten, apart), (apart, ten)):
        index = HeldOut([problem("h", held_out)])
        assert index.match_prompt(f"x {text} y") == Match("overlapping", "h", ten)
        assert index.match_passage(f"x {text} y") == Match("overlapping", "h", ten)


def test_each_set_has_boilerplate_of_its_own() -> None:
    """Four of 4 prompts share the ten words, of 404 they would be less than one in a hundred."""
    template = [problem(f"h{i}", f"{TEN} {i}") for i in range(4)]
    others = [problem(f"o{i}", f"{i} + {i}") for i in range(400)]
    assert HeldOut([*template, *others]).match_prompt(f"{TEN} 9") is not None
    both = HeldOut(template, others)
    assert both.match_prompt(f"{TEN} 9") is None
    assert both.match_prompt(f"{TEN} 3") == Match("equal", "h3", f"{TEN} 3")
    assert both.match_prompt("399 + 399") == Match("equal", "o399", "399 + 399")


def test_n_is_the_length_of_the_match() -> None:
    assert outcome("x a b c y", "p a b c q", n=3) == "overlapping"
    assert outcome("x a b c y", "p a b c q", n=4) == "kept"


TEMPLATE = "state the final answer to the following arithmetic problem"  # nine words


def test_a_template_is_no_collision_but_an_equal_problem_is() -> None:
    held_out = [problem(f"h{i}", f"{TEMPLATE}: {1000 + i} + 77 =") for i in range(10)]
    train = [
        problem("other", f"{TEMPLATE}: 1003 - 5 ="),  # the nine words and one number are ten tokens of h3
        problem("same", f"{TEMPLATE.title()}: 1003 + 77 = ?"),
    ]
    kept, counts, collisions = decontaminate(train, held_out)
    assert [p.id for p in kept] == ["other"]
    # Nine words hold five grams of five; those that reach the first number differ from problem to problem.
    assert counts == {"train": 2, "kept": 1, "equal": 1, "overlapping": 0, "boilerplate": 5}
    assert collisions == [Collision("same", "h3", f"{TEMPLATE} 1003 + 77 =")]


def test_a_templates_content_still_collides() -> None:
    held_out = [problem(f"h{i}", f"{TEMPLATE}: {' + '.join(str(1000 * i + k) for k in range(6))}") for i in range(10)]
    longer = problem("longer", f"{TEMPLATE}: {' + '.join(str(3000 + k) for k in range(6))} - 8")
    kept, counts, collisions = decontaminate([longer], held_out)
    assert kept == [] and counts["overlapping"] == 1 and collisions[0].held_out_id == "h3"


@pytest.mark.parametrize(("sharing", "expected"), [(3, "overlapping"), (4, "kept")])
def test_boilerplate_needs_more_than_three_problems(sharing: int, expected: str) -> None:
    held_out = [problem(f"h{i}", f"{TEN} unlike {i}") for i in range(sharing)]
    assert decontaminate([problem("t", f"{TEN} other")], held_out)[1][expected] == 1


@pytest.mark.parametrize(("sharing", "expected"), [(5, "overlapping"), (6, "kept")])
def test_boilerplate_share(sharing: int, expected: str) -> None:
    # A share of 0.05 of 100 held-out problems is 5; more than that is boilerplate.
    held_out = [problem(f"h{i}", f"{TEN} unlike {i}") for i in range(sharing)]
    held_out += [problem(f"o{i}", f"alone {i}") for i in range(100 - sharing)]
    assert decontaminate([problem("t", f"{TEN} other")], held_out, boilerplate_share=0.05)[1][expected] == 1


def test_a_gram_repeated_in_one_problem_is_no_template() -> None:
    assert outcome(f"x {TEN} y", " z ".join([TEN] * 8)) == "overlapping"


@pytest.mark.parametrize("family", ["chain_sum", "number_sorting", "spell_backward", "gcd"])
def test_generated_families_survive_their_template(family: str) -> None:
    problems = load(ReasoningGymSource(family=family, count=600), seed=0).problems
    train, held_out = split(problems, 0.2, "salt")
    kept, counts, _ = decontaminate(train, held_out)
    assert counts["boilerplate"] > 0
    assert len(kept) >= 0.97 * len(train)
    again, counts, _ = decontaminate(held_out, held_out)
    assert again == [] and counts["equal"] == len(held_out)


def test_nothing_held_out_keeps_everything() -> None:
    train = [problem("t", TEN)]
    assert decontaminate(train, [])[0] == train


def test_examples_are_limited_and_settings_checked() -> None:
    train = [problem(f"t{i}", TEN) for i in range(5)]
    assert [c.train_id for c in decontaminate(train, [problem("h", TEN)], examples=2)[2]] == ["t0", "t1"]
    with pytest.raises(InputError, match="n is 1"):
        decontaminate([], [], 1)
    with pytest.raises(InputError, match="boilerplate_share is 2"):
        decontaminate([], [], boilerplate_share=2)


def test_a_completion_collides_by_ten_words_in_a_row_but_not_by_equality() -> None:
    held_out = HeldOut([problem("h", f"p {TEN} q"), problem("short", "3 + 4 =")])
    assert held_out.match_passage(f"so {TEN.upper()}, then") == Match("overlapping", "h", TEN)
    assert held_out.match_passage("so a b c d e f g h i x j") is None
    assert held_out.match_prompt("3 + 4 = ?") == Match("equal", "short", "3 + 4 =")
    assert held_out.match_passage("3 + 4 = ?") is None


def test_a_passage_is_searched_to_its_end() -> None:
    held_out = HeldOut([problem("h", TEN)])
    filler = " ".join(f"w{i}" for i in range(5000))
    assert held_out.match_passage(f"{filler} {TEN}") is not None
    assert held_out.match_passage(filler) is None and held_out.match_passage("") is None


def test_of_two_held_out_problems_the_first_is_named() -> None:
    assert HeldOut([problem("h1", f"x {TEN}"), problem("h2", f"{TEN} y")]).match_passage(TEN) == Match(
        "overlapping", "h1", TEN
    )


def test_a_completion_may_not_work_out_a_held_out_calculation() -> None:
    held_out = HeldOut([problem("h", "compute 3 - 7 + 7"), problem("k", "compute 1 + 2")])
    assert held_out.match_passage("first 3 - 7 + 7\nthen 3") == Match("equal", "h", "3-7+7")
    assert held_out.match_passage("first -4 + 7\nthen 3") is None
    assert held_out.match_passage("first 1 + 2\nthen 3") is None  # a fact of two numbers, which every sum needs
