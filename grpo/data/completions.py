"""Completions as tokens, for training, and as text, for sampling jobs to store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.data.template import STYLES, tag_sequence

Ends = int | frozenset[int]
"""The token that ends a completion, or tokens of which each does."""


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
    """A completion as text without special tokens but tags, its length in tokens including them, and whether it ended
    by itself.

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


def each_end(ends: Ends) -> list[int]:
    """The tokens that end a completion."""
    return [ends] if isinstance(ends, int) else sorted(ends)


def all_ends(tokenizer: Any, generation: Any) -> frozenset[int]:
    """The tokenizer's end token, and those that a model's generation settings (None: it has none) name besides: some
    chat models end a turn with another token."""
    named = getattr(generation, "eos_token_id", None)
    return frozenset([tokenizer.eos_token_id, *(named if isinstance(named, list | tuple) else [named])]) - {None}


def completion_texts(tokenizer: Any, completions: Sequence[Completion]) -> list[str]:
    """Completions as text, without their end tokens."""
    return decode(tokenizer, (c.tokens[:-1] if c.finished else c.tokens for c in completions))


def decode(tokenizer: Any, rows: Iterable[Sequence[int]]) -> list[str]:
    """The texts of rows of tokens, without special tokens. Tags stay even if they are special tokens of the tokenizer,
    because rewards read them."""
    return decoder_of(tokenizer)(rows)


def decoder_of(tokenizer: Any) -> Callable[[Iterable[Sequence[int]]], list[str]]:
    """`decode` for a tokenizer, for many calls."""
    if not (tags := _special_tags(tokenizer)):
        return lambda rows: [*tokenizer.batch_decode([[*row] for row in rows], skip_special_tokens=True)]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    dropped = special.union(tokenizer.all_special_ids) - tags
    return lambda rows: [*tokenizer.batch_decode([[token for token in row if token not in dropped] for row in rows])]


def _special_tags(tokenizer: Any) -> set[int]:
    """The tags that the tokenizer would leave out of a text with its special tokens."""
    names = {tag for style in STYLES for tag in tag_sequence(style)}
    tokens = {tokenizer.convert_tokens_to_ids(name) for name in names} - {None}
    known = {token for token in tokens if tokenizer.convert_ids_to_tokens(token) in names}  # others are unknown
    return {token for token in known if not tokenizer.decode([token], skip_special_tokens=True)}
