"""Language consistency on sentences whose words can be counted by hand."""

from __future__ import annotations

import pytest

from grpo.language import language_consistency, words

ENGLISH = "First we subtract the roosters, because they never lay any eggs."
GERMAN = "Zuerst ziehen wir die Hähne ab, denn sie legen niemals Eier."


@pytest.mark.parametrize(("text", "target"), [(ENGLISH, "en"), (GERMAN, "de")])
def test_a_sentence_in_its_own_language(text, target):
    assert language_consistency(text, target) == 1


@pytest.mark.parametrize(("text", "target"), [(ENGLISH, "de"), (GERMAN, "en")])
def test_a_sentence_in_another_language(text, target):
    assert language_consistency(text, target) < 0.2  # a few words are at home in both


@pytest.mark.parametrize(
    ("text", "target", "share"),
    [
        ("we subtract these eggs deshalb bleiben zwanzig Hühner", "en", 4 / 8),
        ("we subtract these eggs deshalb bleiben zwanzig Hühner", "de", 4 / 8),
        ("therefore there are three und", "en", 4 / 5),
        ("therefore the answer should be twenty 因此 答案", "en", 6 / 10),
    ],
)
def test_mixed_sentences(text, target, share):
    assert language_consistency(text, target) == pytest.approx(share)


@pytest.mark.parametrize(
    "text",
    [
        "we subtract 28 and 20 from 325",
        "we subtract $\\frac{a}{b} und$ these",
        "we subtract $$zwanzig\nHühner$$ these",
        "we subtract \\sqrt these",
        "we write `zwanzig = Hühner` here",
        "we write\n```python\nzwanzig = Hühner\n```\nhere",
        "we write\n```python\nzwanzig = Hühner",
        "<think>we subtract</think>",
    ],
)
def test_numbers_formulas_code_and_tags_do_not_count(text):
    assert language_consistency(text, "en") == 1
    assert not set(words(text)) & {"zwanzig", "hühner", "frac", "sqrt", "python", "think", "und"}


@pytest.mark.parametrize("target", ["en", "de"])
def test_words_that_languages_share_count_for_the_target(target):
    assert language_consistency("in", target) == 1


@pytest.mark.parametrize("target", ["es", "de"])
def test_es_is_spanish_and_german(target):
    assert language_consistency("es", target) == 1


def test_chinese():
    assert words("我们先减去。") == ["我", "们", "先", "减", "去"]
    assert language_consistency("我们先减去公鸡", "zh") == 1
    assert language_consistency("我们先减去公鸡", "en") == 0
    assert language_consistency("therefore the 公鸡", "en") == 0.5


def test_words_next_to_chinese_without_a_space():
    assert words("所以chickens是") == ["所", "以", "chickens", "是"]


@pytest.mark.parametrize("text", ["", " \n", "277", "$x$", "x + y = 3", "Qwrtzpl"])
def test_text_without_known_words_is_consistent(text):
    assert language_consistency(text, "en") == 1
