"""Completions as tokens, for training, and as text, for sampling jobs to store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Completion:
    """A sampled completion. `tokens` includes the end-of-sequence token if `finished`.

    `logprobs`: log-probability of each token under the distribution at the sampling temperature, before top-p.
    `experts`: the experts that the model's routers chose, a tensor [tokens, routers, experts per token] for the prompt
    and the completion without its last token; None if they are not replayed.
    """

    tokens: list[int]
    logprobs: list[float]
    finished: bool
    experts: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class TextCompletion:
    """A completion as text without special tokens, its length in tokens including them, and whether it ended by
    itself.

    Half a surrogate pair, to which some tokenizers decode, cannot be stored as UTF-8 and becomes "?".
    """

    text: str
    tokens: int
    finished: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text.encode("utf-8", "replace").decode())


@dataclass(frozen=True)
class TextCompletions:
    """The completions of one problem, and the length of its prompt in tokens."""

    texts: list[TextCompletion]
    prompt_tokens: int
