"""Language consistency: the share of words in the target language (R1, stage 2).

The paper does not say how words are found or how their language is identified. Here words are runs of letters; Chinese
text is segmented by jieba. A word's script leaves a few candidate languages. The word belongs to the target if it is at
most ten times rarer there than in the candidate that uses it most (word frequencies of the wordfreq library). So words
that languages share, such as "in" or "es", count for the target. A language that is the only one with its script needs
no frequencies. Numbers, formulas, code and tags are not words. Words unknown in all candidates, such as names, are not
counted.
"""

from __future__ import annotations

import functools
import logging
import unicodedata
from collections.abc import Callable

import regex

from grpo.errors import InputError
from grpo.rewards.word_frequencies import languages as available
from grpo.rewards.word_frequencies import zipf

SCRIPTS: dict[str, tuple[str, ...]] = {
    "LATIN": ("en", "de", "fr", "es", "it", "pt", "nl"),
    "CYRILLIC": ("ru", "uk", "bg", "mk"),
    "ARABIC": ("ar", "fa", "ur"),
    "CJK": ("zh", "ja"),
    "HIRAGANA": ("ja",),
    "KATAKANA": ("ja",),
    "HANGUL": ("ko",),
    "GREEK": ("el",),
    "HEBREW": ("he",),
    "DEVANAGARI": ("hi",),
    "BENGALI": ("bn",),
    "TAMIL": ("ta",),
    "TELUGU": ("te",),
    "THAI": ("th",),
    "GEORGIAN": ("ka",),
    "ARMENIAN": ("hy",),
}
"""Scripts, by the start of their Unicode character names -> candidate languages of a word, in addition to the target.

Not every language is listed: each frequency list takes memory, and closely related languages share too many words.
"""
MARGIN = 1.0
"""How much rarer a shared word may be in the target, in Zipf units (powers of ten of the frequency)."""

_NOT_LANGUAGE = regex.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`"  # code
    r"|\$\$.*?\$\$|\$[^$\n]*+\$|\\\((?:(?!\\\().)*?\\\)|\\\[(?:(?!\\\[).)*?\\\]"  # formulas
    r"|\\(?:begin|end)\{\w+\*?\}|\\[a-zA-Z]+|</?\w+>",
    regex.DOTALL,
)
# Names and numbers joined by operators, such as "eggs = hens - 20". The operator has spaces on both sides or on none:
# "then -4" joins nothing. A single name or number is a chain of one: the next search starts after it, so that a long
# list of numbers is read once.
_NAME = r"[\p{Latin}\p{Greek}\d_]"
_OPERAND = rf"{_NAME}++(?:[.,]\d++(?!{_NAME}))*+"
_CHAIN = regex.compile(rf"(?<!{_NAME}){_OPERAND}(?:(?: [-+*/×÷=<>≤≥≈] |[-+*/×÷=<>≤≥≈]){_OPERAND})*+")
_RELATION = regex.compile(r"[=<>≤≥≈]")
_IDENTIFIER = regex.compile(r"\b[a-zA-Z]++_\w++")
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}ー"
_WORD = regex.compile(
    rf"\p{{Han}}+|[{_UNSPACED}--\p{{Han}}]+"
    rf"|[\p{{L}}\p{{M}}--[{_UNSPACED}]]+(?:['’][\p{{L}}\p{{M}}--[{_UNSPACED}]]+)*",
    regex.V1,
)
_SENTENCE_END = regex.compile(r"[.!?。！？\n]+")
_WITHOUT_ALPHABET = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL")
_JUDGED_CHARACTERS = 60
"""Longer words are truncated to this length: no frequency list has them, and the cache would keep them."""


def language_consistency(text: str, target: str) -> float:
    """Share of the words of known language in `text` that are in `target` (an ISO 639-1 code, optionally with a
    region),
    0..1.

    Text without any such word scores 1.0: nothing is in a wrong language. Raises InputError if the language is unknown.
    """
    check_language(target)
    language = target.split("-")[0]
    verdicts: list[bool] = []
    for sentence in _sentences(text):
        # Kana distinguish Japanese from Chinese, which share the other characters.
        beginnings = [word[:_JUDGED_CHARACTERS] for word in sentence]
        japanese = any(_script(word) in ("HIRAGANA", "KATAKANA") for word in beginnings)
        in_language = [_in_language(word, language, japanese) for word in beginnings]
        verdicts += [verdict for verdict in in_language if verdict is not None]
    return sum(verdicts) / len(verdicts) if verdicts else 1.0


def check_language(target: str) -> None:
    """Raises InputError unless words of this language can be recognized."""
    if target.split("-")[0] not in _known():
        raise InputError(f"language {target!r}: no word frequencies for it; known are {', '.join(sorted(_known()))}")


def load() -> None:
    """Loads the frequencies that nearly every text needs: those of languages in Latin script."""
    for language in SCRIPTS["LATIN"]:
        _zipf("a", language)


def words(text: str) -> list[str]:
    """Lower-cased words of two or more letters, or of one character in scripts without an alphabet.

    Omits formulas, code and tags. Japanese is split where its scripts change; Thai is not split.
    """
    return [word for sentence in _sentences(text) for word in sentence]


def _sentences(text: str) -> list[list[str]]:
    text = _NOT_LANGUAGE.sub(" ", text)
    text = _CHAIN.sub(lambda chain: " " if _RELATION.search(chain[0]) else chain[0], text)
    return [_words(sentence) for sentence in _SENTENCE_END.split(_IDENTIFIER.sub(" ", text))]


def _words(sentence: str) -> list[str]:
    words: list[str] = []
    for run in _WORD.findall(sentence.lower()):
        script = _script(run[:_JUDGED_CHARACTERS])
        if script == "CJK":
            words += _segmenter()(run)
        elif len(run) > 1 or script in _WITHOUT_ALPHABET:
            words.append(run)
    return words


@functools.cache
def _segmenter() -> Callable[[str], list[str]]:
    from wordfreq.chinese import jieba_tokenize

    logging.getLogger("jieba").setLevel(logging.WARNING)  # silences its message about loading its dictionary
    return jieba_tokenize


@functools.cache
def _known() -> set[str]:
    return set(available()) | {languages[0] for languages in SCRIPTS.values() if len(languages) == 1}


@functools.lru_cache(maxsize=100_000)
def _script(word: str) -> str | None:
    """The script of a word; None if it mixes scripts, such as πr, or its script is not listed."""
    scripts = {unicodedata.name(letter, "").split(" ")[0].split("-")[0] for letter in word if letter.isalpha()}
    script = scripts.pop() if len(scripts) == 1 else None
    return script if script in SCRIPTS else None


@functools.lru_cache(maxsize=100_000)
def _in_language(word: str, target: str, japanese: bool) -> bool | None:
    script = _script(word)
    if script is None:
        return None
    languages = SCRIPTS[script]
    if script == "CJK":
        return target == ("ja" if japanese else "zh")
    if len(languages) == 1:
        return target == languages[0]
    frequency = _zipf(word, target)
    others = max(_zipf(word, language) for language in languages if language != target)
    if frequency == others == 0:
        return None if script == "LATIN" or target in languages else False
    return frequency > 0 and frequency >= others - MARGIN


def _zipf(word: str, language: str) -> float:
    # wordfreq would segment Japanese and Korean with MeCab; here words are not segmented.
    return zipf(word, language, whole=language in ("ja", "ko"))
