from __future__ import annotations

import pytest
import wordfreq

from grpo.rewards.word_frequencies import zipf


@pytest.mark.parametrize("language", ["en", "fr", "it", "ru", "ar", "zh"])
def test_the_values_are_wordfreqs(language):
    listed = wordfreq.top_n_list(language, 60_000)[::37]
    parts = [f"l'{word}" for word in listed[:50]] + [f"{word}-{word}" for word in listed[:20]]
    for word in [*listed, *parts, "qzxjv", "the", "xyzzy'qwfp"]:
        assert zipf(word, language) == pytest.approx(wordfreq.zipf_frequency(word, language), abs=0.011), word


def test_a_word_by_hand():
    assert zipf("the", "en") == 7.73  # 5.4% of all words: log10(0.0537e9) = 7.73
    assert zipf("qzxjv", "en") == 0.0
    assert zipf("the", "tlh") == 0.0  # no list for Klingon


def test_a_word_taken_whole_is_not_cut():
    assert zipf("l'eau", "fr") > 0
    assert zipf("l'eau", "fr", whole=True) == 0.0
