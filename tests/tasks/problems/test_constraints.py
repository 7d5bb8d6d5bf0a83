"""Constraints: each on both sides of its boundary."""

from __future__ import annotations

import re
from typing import Any

import pytest

from grpo.errors import InputError
from tasks.problems.constraints import read_constraints, satisfied, share_satisfied


def keeps(response: str, **constraint: Any) -> bool:
    return satisfied(read_constraints({"constraints": [constraint]})[0], response)


@pytest.mark.parametrize(("text", "kept"), [("a", False), ("a b", True), ("a b c", True), ("a b c d", False)])
def test_two_or_three_words(text: str, kept: bool) -> None:
    assert keeps(text, kind="words", min=2, max=3) == kept


def test_sentences_end_in_a_mark() -> None:
    assert keeps("One. Two! Is 3.5 three?", kind="sentences", min=3, max=3)
    assert not keeps("One. Two!", kind="sentences", min=3)


def test_bullets_and_numbers_begin_a_line() -> None:
    text = "rivers:\n- rhine\n* elbe\n1. oder\na - b"
    assert keeps(text, kind="bullets", min=3, max=3)
    assert not keeps(text, kind="bullets", min=4) and not keeps(text, kind="bullets", max=2)


def test_a_bullet_has_its_text_on_its_own_line() -> None:
    assert not keeps("x\n-\n\ntext", kind="bullets", min=1) and keeps("x\n\n \t- text", kind="bullets", min=1)


def test_included_and_excluded_words_are_whole() -> None:
    assert keeps("The Cat sat", kind="includes", words=["cat", "sat"])
    assert not keeps("the cat sat", kind="includes", words=["cat", "dog"])
    assert not keeps("concatenate", kind="includes", words=["cat"])
    assert keeps("concatenate", kind="excludes", words=["cat"])
    assert not keeps("a cat, a dog", kind="excludes", words=["bird", "cat"])


def test_beginning_and_end() -> None:
    assert keeps("  Dear Anna, hello", kind="starts_with", text="dear anna")
    assert not keeps("Hello, dear Anna", kind="starts_with", text="dear")
    assert keeps("all is well. Goodbye\n", kind="ends_with", text="goodbye")
    assert not keeps("goodbye then", kind="ends_with", text="goodbye")


def test_language() -> None:
    german = "der fluss ist lang und kalt"
    assert keeps(german, kind="language", language="de") and not keeps(german, kind="language", language="en")


@pytest.mark.parametrize("language", ["kn", "mr", "ne", "pa", "gu", "sw", "ml"])
def test_a_language_that_cannot_be_recognized_is_no_constraint(language: str) -> None:
    with pytest.raises(InputError, match=f"language '{language}': no word frequencies for it; known are ar, "):
        read_constraints({"constraints": [{"kind": "language", "language": language}]})


def test_json_is_all_of_the_response() -> None:
    assert keeps('{"a": 1}', kind="json") and keeps('```json\n{"a": 1}\n```', kind="json")
    assert not keeps('here: {"a": 1}', kind="json") and not keeps("{a: 1}", kind="json")
    assert keeps('{"a": 1, "b": 2}', kind="json", keys=["a"]) and not keeps('["a"]', kind="json", keys=["a"])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("* a\n- b\n1. c\n2) d\n• e", 2),
        ("-a\n*b\n  - c\n\n\n\t* d", 4),
        ("**Title**\n* a\n** b", 1),
        ("x\n---\na - b\na * b", 1),
        ("*\n* swallowed by the line before\n* c", 2),
    ],
)
def test_ifevals_bullets_are_lines_with_a_star_or_a_dash(text: str, count: int) -> None:
    assert keeps(text, kind="bullets", markdown=True, min=count, max=count)
    stars = re.findall(r"^\s*\*[^\*].*$", text, flags=re.MULTILINE)  # as its paper's program counts
    assert len(stars) + len(re.findall(r"^\s*-.*$", text, flags=re.MULTILINE)) == count


def test_ifevals_words_keywords_ends_and_json() -> None:
    assert keeps("don't stop-it, x_1", kind="words", runs=True, min=5, max=5)
    assert not keeps("don't stop-it, x_1", kind="words", min=5)
    assert keeps("The Cats sat", kind="includes", words=["cat", "sat"], whole=False)
    assert not keeps("the cats", kind="includes", words=["cat", "dog"], whole=False)
    assert keeps('"All is well. Goodbye."\n', kind="ends_with", text="goodbye.", quoted=True)
    assert not keeps('"All is well. Goodbye."', kind="ends_with", text="goodbye.")
    for text in ("```JSON\n[1]\n```", "```json [1]```", "```\n[1]", "[1]\n```"):
        assert keeps(text, kind="json", any_fence=True) and not keeps(text, kind="json")
    assert not keeps("Here:\n```json\n[1]\n```", kind="json", any_fence=True)


def test_an_empty_response_keeps_nothing() -> None:
    assert not keeps(" ", kind="excludes", words=["cat"]) and not keeps("", kind="words", max=5)


def test_the_score_is_the_share_kept() -> None:
    both = [{"kind": "words", "max": 3}, {"kind": "includes", "words": ["cat"]}]
    constraints = read_constraints({"constraints": both})
    scores = [share_satisfied(constraints, text) for text in ("a cat", "a dog", "there is a dog here")]
    assert scores == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        ({"kind": "rhyme"}, "constraints.0"),
        ({"kind": "words"}, "give min, max or both"),
        ({"kind": "words", "min": 3, "max": 2}, "max 2 is below min 3"),
        ({"kind": "includes", "words": []}, "words"),
        ({"kind": "json", "key": "a"}, "key"),
        ("words", "constraints.0"),
    ],
)
def test_wrong_constraints_are_one_line(constraint: Any, said: str) -> None:
    with pytest.raises(InputError) as error:
        read_constraints({"constraints": [constraint]})
    assert said in str(error.value) and "\n" not in str(error.value)


def test_problems_without_constraints_have_none() -> None:
    assert read_constraints({}) == []
