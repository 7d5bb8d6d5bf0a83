"""Training examples of supervised losses, as token ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Tokens = Sequence[int]


def compact(ids: Iterable[int]) -> array[int]:
    """Token ids at 4 bytes each; a list of Python integers takes 36."""
    return array("I", ids)


@dataclass(frozen=True)
class Example:
    """One or more sequences trained on together, each a non-empty prompt and its continuation, as token ids."""

    prompts: Sequence[Tokens]
    rests: Sequence[Tokens]
    weight: int  # share in the batch mean: trained tokens, or 1
    label: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(map(len, (*self.prompts, *self.rests)))
