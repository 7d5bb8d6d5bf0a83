"""Duplicates: equal completions of one prompt, and completions that share most of their word shingles.

Exact duplicates are equal but for case and white space, and are found by digest. For near duplicates, MinHash
signatures (the library rensa; half a kilobyte per text, 0.1 us per comparison) rule out nearly all pairs; only pairs
near the threshold are compared by their shingles. So the verdict is exact, whatever the library's hash functions.
"""

from __future__ import annotations

import hashlib
import unicodedata

from rensa import RMinHash

from tasks.sft_data.filters import words_of

SLOTS = 128
"""Hash functions of a signature."""
MARGIN = 0.2
"""An estimate from SLOTS hash functions has a standard deviation of at most 0.044. Pairs whose estimate is this far
below the threshold are not compared further."""


def completion_digest(prompt: str, completion: str) -> int:
    """64-bit unsigned digest of a completion and its problem's text (`Problem.text`, not the id); equal for duplicates.

    Among 800,000 different pairs, the probability of any collision is 2e-8.
    """
    text = f"{_normal(prompt)}\0{_normal(completion)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


class Shingles:
    """A text's set of shingles, runs of `size` words. A shorter text is one shingle."""

    def __init__(self, text: str, size: int):
        self.text, self.size = text, size
        self.signature = RMinHash(num_perm=SLOTS, seed=0)
        self.signature.update(self._runs())

    def jaccard(self, other: Shingles) -> float:
        """Jaccard similarity: size of the intersection over size of the union, from 0 to 1."""
        # Not kept: the sets of a shard's long completions would take gigabytes.
        mine, theirs = set(self._runs()), set(other._runs())
        shared = len(mine & theirs)
        return shared / (len(mine) + len(theirs) - shared)

    def near(self, other: Shingles, threshold: float) -> bool:
        """Whether the Jaccard similarity is at least `threshold`."""
        likely = self.signature.jaccard(other.signature) >= threshold - MARGIN
        return likely and self.jaccard(other) >= threshold

    def _runs(self) -> list[str]:
        words = words_of(self.text)
        runs = zip(*(words[i:] for i in range(self.size)), strict=False)
        return [" ".join(run) for run in runs] or [" ".join(words)]
