"""Converts the ends of a completion's steps from characters to tokens."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

from grpo.data.completions import decoder_of

BLOCK = 32
"""Number of tokens that are searched together."""
CONTEXT = 8
"""Number of preceding tokens that are decoded with them, because a token's text depends on its neighbours. One
character may take four tokens, and some tokenizers drop a space at the beginning."""
INCOMPLETE = "\ufffd"
"""The replacement character: what decoding yields when a character's last bytes are missing."""


def step_tokens(tokenizer: Any, tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """For each of the ascending `ends` (characters of the decoded text), returns the index of the first token by which
    that many characters are complete, or of the last token if they never are.

    Decodes each token a bounded number of times, regardless of the number of steps.
    """
    found: list[int] = []
    before, decode = 0, decoder_of(tokenizer)
    for start in range(0, len(tokens), BLOCK):
        block = _Block(decode, tokens, start, before)
        while len(found) < len(ends) and ends[len(found)] <= block.complete(block.stop - 1):
            found.append(block.reaching(ends[len(found)]))
        before = block.characters(block.stop)
    return found + [len(tokens) - 1] * (len(ends) - len(found))


class _Block:
    """Tokens from `start` up to `stop`, preceded by `before` characters."""

    def __init__(self, decode: Callable[..., list[str]], tokens: Sequence[int], start: int, before: int):
        self.decode, self.tokens = decode, tokens
        self.start, self.stop = start, min(start + BLOCK, len(tokens))
        self._context, self._texts = max(0, start - CONTEXT), dict[int, str]()
        self._offset = before - len(self._text(start))

    def characters(self, until: int) -> int:
        """Number of characters of all tokens before `until`."""
        return self._offset + len(self._text(until))

    def complete(self, last: int) -> int:
        """Number of characters of all tokens up to and including `last`; a character cut off there does not count."""
        return self._offset + len(self._text(last + 1).rstrip(INCOMPLETE))

    def reaching(self, characters: int) -> int:
        """The first token of the block by which that many characters are complete."""
        return bisect.bisect_left(range(self.stop), characters, lo=self.start, key=self.complete)

    def _text(self, until: int) -> str:
        if until not in self._texts:
            (self._texts[until],) = self.decode([self.tokens[self._context : until]])
        return self._texts[until]
