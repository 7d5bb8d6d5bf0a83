"""Word frequencies in a tenth of the memory of wordfreq's own dictionaries. Memory matters because there are several
scoring processes, each with several languages."""

from __future__ import annotations

import functools
import math

import numpy as np

TOP = 9.0
"""The largest Zipf value: log10 of the occurrences in a billion words of a word that is the only word."""


@functools.cache
def languages() -> dict[str, str]:
    """Language -> the file of its frequencies."""
    from wordfreq import available_languages  # takes as long to import as all of grpo.rewards

    return available_languages()


def zipf(word: str, language: str, *, whole: bool = False) -> float:
    """log10 of occurrences in a billion words, like `wordfreq.zipf_frequency`; 0 for an unlisted word.

    A word that the language tokenizes into several, such as l'eau, gets their combined frequency, unless `whole`.
    """
    if language not in languages():
        return 0.0
    from wordfreq import lossy_tokenize

    parts = [word] if whole else lossy_tokenize(word, language)
    ranks = [_listed(part, language) for part in parts]
    if not ranks or None in ranks:
        return 0.0
    if len(ranks) == 1:
        return max(0.0, TOP - (ranks[0] or 0) / 100)
    # From the frequencies f of the parts: 1 / (1/f + 1/f + ...). In Chinese, where anything can be split into listed
    # words, each split makes it ten times rarer.
    together = TOP - math.log10(sum(10 ** ((at or 0) / 100) for at in ranks))
    return max(0.0, round(together - (len(ranks) - 1 if language == "zh" else 0), 2))


def _listed(word: str, language: str) -> int | None:
    """How far a word is below TOP, in hundredths of log10; None if it is not listed."""
    hashes, below = _table(language)
    place = int(np.searchsorted(hashes, key := _hash(word)))
    return int(below[place]) if place < len(hashes) and hashes[place] == key else None


def _hash(word: str) -> int:
    # Some builds of Python hash strings of up to 7 bytes with a weaker function, for which hundreds of words collide.
    return hash("a word: " + word)


@functools.cache
def _table(language: str) -> tuple[np.ndarray, np.ndarray]:
    """Sorted hashes of the words, and each word's rarity. wordfreq groups words by rarity, in hundredths of log10.

    The chance that any two of some 300,000 words share a 64-bit hash is about one in a hundred million per language.
    """
    from wordfreq import read_cBpack

    by_rarity = read_cBpack(languages()[language])
    hashes = np.fromiter((_hash(word) for words in by_rarity for word in words), np.int64)
    below = np.repeat(np.arange(len(by_rarity), dtype=np.int16), [len(words) for words in by_rarity])
    order = np.argsort(hashes, kind="stable")
    return hashes[order], below[order]
