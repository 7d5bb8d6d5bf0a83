"""Language consistency: the share of words in the target language (R1, stage 2).

The paper does not say how words are found or identified. Here a word belongs to the target language if it is at most
ten times rarer there than in the candidate language that uses it most (word frequencies of the wordfreq library): words
that languages share, such as "in" or "es", count for the target. Numbers, formulas, code and tags are no words. Words
that no candidate knows, names for instance, count neither way.
"""

from __future__ import annotations

import functools
import re

from wordfreq import available_languages, zipf_frequency

from grpo.errors import InputError

CANDIDATES = ("en", "de", "fr", "es", "it", "pt", "nl")
MARGIN = 1.0
"""Zipf units, that is powers of ten of the frequency, by which a shared word may be rarer in the target."""
_NOT_LANGUAGE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\[a-zA-Z]+|</?\w+>", re.DOTALL)
_WORD = re.compile(r"[\u4e00-\u9fff]|[^\W\d_\u4e00-\u9fff]+(?:['’][^\W\d_\u4e00-\u9fff]+)*")
_HAN = re.compile(r"[\u4e00-\u9fff]")


def language_consistency(text: str, target: str) -> float:
    """Words of `target` (an ISO 639-1 code) divided by all words of known language in `text`; 0..1.

    Text without any such word is consistent (1.0): there is nothing in a wrong language.
    """
    if target not in _known():
        raise InputError(f"language {target!r}: no word frequencies for it; known are {', '.join(sorted(_known()))}")
    verdicts = [is_target for word in words(text) if (is_target := _in_language(word, target)) is not None]
    return sum(verdicts) / len(verdicts) if verdicts else 1.0


def words(text: str) -> list[str]:
    """Lower-cased words of two or more letters, and Han characters one by one; formulas, code and tags left out."""
    found = _WORD.findall(_NOT_LANGUAGE.sub(" ", text))
    return [word.lower() for word in found if len(word) > 1 or _HAN.match(word)]


@functools.cache
def _known() -> set[str]:
    return set(available_languages())


@functools.lru_cache(maxsize=100_000)
def _in_language(word: str, target: str) -> bool | None:
    if _HAN.match(word):
        return target in ("zh", "ja")
    if target in ("zh", "ja"):
        return False
    frequency = zipf_frequency(word, target)
    others = max(zipf_frequency(word, language) for language in CANDIDATES if language != target)
    if frequency == others == 0:
        return None
    return frequency > 0 and frequency >= others - MARGIN
