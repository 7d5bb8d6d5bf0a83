"""Completions as tokens, which a trainer learns from, and as text, which a sampling job stores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Completion:
    """A sampled completion. `tokens` include the end-of-sequence token if `finished`.

    `logprobs`: log-probability of each token under the distribution at the sampling temperature, before top-p.
    `experts`: those that the model's routers chose, a tensor [tokens, routers, experts a token] of the prompt and the
    completion without its last token; None where they are not replayed.
    """

    tokens: list[int]
    logprobs: list[float]
    finished: bool
    experts: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class TextCompletion:
    """A completion as text: without special tokens, its length in tokens with them, and whether it ended by itself."""

    text: str
    tokens: int
    finished: bool


@dataclass(frozen=True)
class TextCompletions:
    """The completions of one problem, and the length of its prompt in tokens."""

    texts: list[TextCompletion]
    prompt_tokens: int
