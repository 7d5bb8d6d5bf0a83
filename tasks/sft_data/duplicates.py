"""Duplicates: equal completions to one prompt, and completions that share most of their word shingles.

Exact duplicates are equal except for case and white space, and are found by digest. For near duplicates, MinHash
signatures (the library rensa; half a kilobyte per text, 0.1 us per comparison) rule out nearly all pairs. Only pairs
near the threshold are compared by their shingles, so the result is exact, whatever hash functions the library uses.
"""

from __future__ import annotations

import hashlib
import unicodedata

from rensa import RMinHash

from tasks.sft_data.filters import words_of

SLOTS = 128
"""Number of hash functions in a signature."""
MARGIN = 0.2
"""An estimate from SLOTS hash functions has a standard deviation of at most 0.044. A pair whose estimate is this far
below the threshold is not compared further."""


def completion_digest(prompt: str, completion: str) -> int:
    """64-bit unsigned digest of a completion and its problem's text (`Problem.text`, not the id). Equal for duplicates.

    Among 800,000 different pairs, the probability of any collision is 2e-8.
    """
    text = f"{_normal(prompt)}\0{_normal(completion)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


class Shingles:
    """A text's set of shingles: runs of `size` words. A shorter text is a single shingle."""

    def __init__(self, text: str, size: int):
        self.text, self.size = text, size
        self.signature = RMinHash(num_perm=SLOTS, seed=0)
        self.signature.update(self._runs())

    def jaccard(self, other: Shingles) -> float:
        """Jaccard similarity, from 0 to 1: size of the intersection divided by size of the union."""
        # Not stored: the sets of a shard's long completions would take gigabytes.
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
