"""Training examples of supervised losses, as token ids."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """One or more sequences trained on together, each a non-empty prompt and its continuation, in token ids."""

    prompts: list[list[int]]
    rests: list[list[int]]
    weight: int  # share in the batch mean: trained tokens, or 1
    label: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(map(len, (*self.prompts, *self.rests)))
