"""Near duplicates: completions that share most of their word shingles.

MinHash signatures (the library rensa) tell nearly all pairs apart in a tenth of a microsecond and half a kilobyte a
text; only pairs close to the threshold are compared by their shingles. So the verdict is the exact one, whatever the
library's hash functions.
"""

from __future__ import annotations

from rensa import RMinHash

from tasks.sft_data.filters import words_of

SLOTS = 128
MARGIN = 0.2
"""An estimate from so many slots has a standard deviation of at most 0.044: who is this far below is not compared."""


class Shingles:
    """The set of runs of `size` words of a text; of a text with fewer words, all of them as one run."""

    def __init__(self, text: str, size: int):
        self.text, self.size = text, size
        self.signature = RMinHash(num_perm=SLOTS, seed=0)
        self.signature.update(self._runs())

    def jaccard(self, other: Shingles) -> float:
        """Size of the intersection by size of the union, in [0, 1]."""
        # Made anew each time: the sets of a shard's long completions would be gigabytes.
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
