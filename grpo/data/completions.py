"""Completions as text."""

from __future__ import annotations

from dataclasses import dataclass


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
