"""Measures of a completion's text."""

from __future__ import annotations

import pytest

from grpo.data.template import AnswerForm
from grpo.rewards.text import before_result, conclusions, marks_in_order, repeated_ngram_share, single_marks

TAGS, BOXED = AnswerForm(), AnswerForm("boxed")


@pytest.mark.parametrize(
    ("reasoning", "found"),
    [
        ("so \\boxed{\\frac{1}{2}} and not \\boxed{3}, as 4 > 3", ["3"]),
        ("so \\boxed{\\frac{1}{2}} it is", ["\\frac{1}{2}"]),
        ("\\boxed{never closed, 5", ["5", "\\boxed{never closed, 5"]),
        ("The answer is 7. It is odd.\nThree terms were summed.", ["7", "7", "7"]),
        ("The answer is Paris.", ["Paris", "Paris"]),
        ("the result is 3 + 4 = 7 hens", ["3 + 4 = 7 hens", "7 hens", "7"]),
        ("so the result is -7", ["-7", "-7", "-7"]),
        ("also ist das ergebnis 7", ["7", "7", "7"]),
        ("Antwort: B", ["B", "B"]),
        ("结果是 12，检查完毕。", ["12，检查完毕", "12，检查完毕", "12"]),
        ("8 - 1 = 7", ["7", "7"]),
        ("8-1", ["1", "8-1"]),  # a minus between numbers is no sign
        ("it costs $1,234.50", ["$1,234.50", "it costs $1,234.50"]),
        ("about 1/2, that is 50%", ["50%", "about 1/2, that is 50%"]),
        ("so $x = \\sqrt{2}$.", ["2", "\\sqrt{2}"]),
        ("Paris", ["Paris"]),
        ("", []),
    ],
)
def test_conclusions(reasoning, found):
    assert conclusions(reasoning) == found


def test_tags():
    assert marks_in_order("<think></think><think></think><answer></answer>", TAGS)
    assert not marks_in_order("<think></think><answer>", TAGS)
    assert not marks_in_order("<think></reasoning><answer></answer>", TAGS)
    assert single_marks("<think></think><think></think><answer></answer>", TAGS) == 0.5
    assert single_marks("<reasoning></reasoning><answer></answer>", TAGS) == 1


def test_marks_of_a_boxed_answer():
    assert marks_in_order("<think></think> so \\boxed{1} or \\boxed{2}", BOXED)
    assert not marks_in_order("\\boxed{1} <think></think>", BOXED)
    assert single_marks("<think></think> so \\boxed{1} or \\boxed{2}", BOXED) == 2 / 3
    assert single_marks("<think></think><answer></answer>", BOXED) == 2 / 3
    assert single_marks("<think></think> a program", AnswerForm("boxed", whole=True)) == 1
    for text in ("<think></think> \\boxed{1}", "<think></think><answer></answer>"):
        assert marks_in_order(text, AnswerForm("auto")) and single_marks(text, AnswerForm("auto")) == 1


def test_repeated_share():
    assert repeated_ngram_share("a b c a b c", 3) == 1 / 4  # abc bca cab abc
    assert repeated_ngram_share("a, a, a", 1) == 3 / 5  # a , a , a
    assert repeated_ngram_share("減法減法", 2) == pytest.approx(1 / 3)  # in characters: 減法 法減 減法
    assert repeated_ngram_share("はいはい", 2) == pytest.approx(1 / 3)
    assert repeated_ngram_share("a b", 3) == 0


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("first 7\nthe answer is 7\n7", "first 7\n"),
        ("the answer is 7\nno\nthe result is 8", "the answer is 7\nno\n"),
        ("the answer is 7", ""),
        ("first 7\n7", "first 7\n7"),
    ],
)
def test_lines_before_the_result(text, before):
    assert before_result(text) == before
