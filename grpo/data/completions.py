"""Completions, as a policy samples them and as text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Completion:
    """A sampled completion. `tokens` end with the end mark if `finished`; `logprobs` are those of the distribution at
    the sampling temperature, before top-p."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool


@dataclass(frozen=True)
class Text:
    text: str  # without special tokens
    tokens: int  # with the end mark
    finished: bool  # it ended by itself


@dataclass(frozen=True)
class Written:
    """The completions of one problem."""

    texts: list[Text]
    prompt_tokens: int
