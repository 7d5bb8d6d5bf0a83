"""Language consistency on sentences whose words can be counted by hand."""

from __future__ import annotations

import pytest

from grpo.errors import InputError
from grpo.rewards.language import language_consistency, words

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
        ("therefore the answer should be twenty 因此 答案", "en", 6 / 8),
        # Eight English words; 所以 答案 是 正确 的 are five.
        ("First we subtract the roosters from the chickens. 所以答案是正确的。", "en", 8 / 13),
        ("First we subtract the roosters from the chickens. 所以答案是正确的。", "zh", 5 / 13),
        ("Сначала мы вычитаем the roosters", "ru", 3 / 5),
        ("우리는 먼저 수탉을 subtract", "ko", 3 / 4),
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


def test_chinese_is_counted_by_its_words():
    assert words("我们先减去公鸡。") == ["我们", "先", "减去", "公鸡"]
    assert words("我們先計算總數") == ["我們", "先", "計算", "總數"]
    assert language_consistency("我们先减去公鸡", "zh") == language_consistency("我们先减去公鸡", "zh-CN") == 1
    assert language_consistency("我们先减去公鸡", "en") == 0
    assert language_consistency("therefore the 公鸡", "en") == 2 / 3


def test_chinese_with_names_of_variables_and_formulas():
    text = "设 eggs = hens - roosters，hens=325，则 $\\text{total} = 297$，最后减去 laying_hens，答案是 297。"
    assert words(text) == ["设", "则", "最后", "减去", "答案", "是"]
    assert language_consistency(text, "zh") == 1
    assert language_consistency("我们看 DNA 和 CPU", "zh") == 1  # frequent in Chinese text
    assert language_consistency("我们先 subtract 公鸡", "zh") == 3 / 4


def test_formulas_in_plain_text_are_no_words():
    assert words("so Eier = Hühner - 20 holds") == ["so", "holds"]
    assert words("so \\(Eier + x\\) and \\[\nHühner\n\\] hold") == ["so", "and", "hold"]
    assert words("then -4 + 7") == ["then"]  # no relation: a word before a number is a word
    assert words("well-known and/or a - b") == ["well", "known", "and", "or"]


def test_words_next_to_chinese_without_a_space():
    assert words("所以chickens是") == ["所以", "chickens", "是"]


OWN = {
    "ru": "Сначала мы вычитаем петухов",
    "uk": "Спочатку ми віднімаємо півнів",
    "el": "Αφαιρούμε πρώτα τους κόκορες",
    "ar": "أولا نطرح الديوك من العدد",
    "he": "קודם נחסיר את התרנגולים",
    "hi": "पहले हम मुर्गों को घटाते हैं",
    "ko": "우리는 먼저 수탉을 뺀다",
    "ja": "まず雄鶏の数を引きます",
    "zh": "我们先减去公鸡的数量",
    "th": "ก่อนอื่นเราลบไก่ตัวผู้",
    "en": ENGLISH,
    "de": GERMAN,
}


@pytest.mark.parametrize("target", OWN)
def test_other_scripts(target):
    for language, text in OWN.items():
        share = language_consistency(text, target)
        assert share == 1 if language == target else share <= 0.25


def test_kana_tell_japanese_from_chinese():
    assert words("私は鶏を数えます。") == ["私", "は", "鶏", "を", "数", "えます"]
    assert language_consistency("私は鶏を数えます。我们减去公鸡。", "ja") == 6 / 9  # 我们 减去 公鸡 are three
    assert language_consistency("私は鶏を数えます。我们减去公鸡。", "zh") == 3 / 9


def test_symbols_of_mixed_scripts_count_neither_way():
    assert words("the area is πr²") == ["the", "area", "is", "πr"]
    assert language_consistency("the area is πr²", "en") == 1


def test_an_unknown_language():
    with pytest.raises(InputError, match="language 'xx': no word frequencies for it; known are ar, "):
        language_consistency("text", "xx")


@pytest.mark.parametrize("text", ["", " \n", "277", "$x$", "x + y = 3", "Qwrtzpl"])
def test_text_without_known_words_is_consistent(text):
    assert language_consistency(text, "en") == 1
