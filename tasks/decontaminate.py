"""Decontamination: training prompts that share ten words in a row with a held-out prompt are dropped.

Departure from the paper, which says only "10-gram match": text that held-out problems share among themselves is a
template ("State the final answer to the following arithmetic problem: ...") and proves nothing, so an n-gram is
ignored when it is, or contains, boilerplate. Boilerplate is looked for in grams of n // 2 tokens: a template of nine
words is in no 10-gram by itself, yet it would make a collision of any two problems that go on with one same number.
Equality of all tokens is always a collision, template or not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from grpo.data import Problem
from grpo.errors import InputError

Tokens = tuple[str, ...]

BOILERPLATE_MIN = 3
"""Held-out problems that may share a gram, however few there are, before it counts as boilerplate."""

_IDEOGRAPH = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
# Scripts without spaces: each character is a token. Numbers keep their decimals. Operators are tokens, other
# punctuation is not.
_TOKEN = re.compile(rf"[{_IDEOGRAPH}]|\d+(?:\.\d+)?|[^\W\d_{_IDEOGRAPH}]+|[-+*/=<>^%\u00d7\u00f7\u2212\u2264\u2265]")


@dataclass(frozen=True)
class Collision:
    """A training problem that was dropped, the held-out problem it matched, and the tokens they share."""

    train_id: str
    held_out_id: str
    shared: str


def decontaminate(
    train: Sequence[Problem],
    held_out: Sequence[Problem],
    n: int = 10,
    *,
    boilerplate_share: float = 0.01,
    examples: int = 10,
) -> tuple[list[Problem], dict[str, int], list[Collision]]:
    """(kept, counts, the first `examples` collisions).

    Prompts shorter than `n` tokens match by equality of all their tokens alone. A gram is boilerplate when more than
    max(3, `boilerplate_share` x held-out problems) of them hold it. Counts: train = kept + equal + overlapping, and
    boilerplate, the number of distinct grams ignored as such.
    """
    if n < 2:
        raise InputError(f"n is {n}; matching needs grams of at least 2 tokens, the paper's is 10")
    if not 0 <= boilerplate_share <= 1:
        raise InputError(f"boilerplate_share is {boilerplate_share}; it is a share between 0 and 1")
    held_tokens = [tokens(problem.text) for problem in held_out]
    boilerplate = _boilerplate(held_tokens, n // 2, max(BOILERPLATE_MIN, boilerplate_share * len(held_out)))
    whole: dict[Tokens, str] = {}
    parts: dict[Tokens, str] = {}
    for problem, words in zip(held_out, held_tokens, strict=True):
        whole.setdefault(words, problem.id)
        for gram in _evidence(words, n, boilerplate):
            parts.setdefault(gram, problem.id)

    kept: list[Problem] = []
    collisions: list[Collision] = []
    counts = {"train": len(train), "kept": 0, "equal": 0, "overlapping": 0, "boilerplate": len(boilerplate)}
    for problem in train:
        words = tokens(problem.text)
        overlap = next((gram for gram in _evidence(words, n, boilerplate) if gram in parts), ())
        if words in whole:
            outcome, shared, held_out_id = "equal", words, whole[words]
        elif overlap:
            outcome, shared, held_out_id = "overlapping", overlap, parts[overlap]
        else:
            kept.append(problem)
            counts["kept"] += 1
            continue
        counts[outcome] += 1
        if len(collisions) < examples:
            collisions.append(Collision(problem.id, held_out_id, " ".join(shared)))
    return kept, counts, collisions


def tokens(text: str) -> Tokens:
    """Lower-cased words, numbers and operators: "What is 3.5 + 2x?" is what, is, 3.5, +, 2, x."""
    return tuple(_TOKEN.findall(text.lower()))


def _grams(words: Tokens, n: int) -> list[Tokens]:
    return [words[i : i + n] for i in range(len(words) - n + 1)]


def _boilerplate(prompts: Sequence[Tokens], n: int, most: float) -> set[Tokens]:
    # Once a prompt: a gram repeated within one problem is no template.
    prompts_with = Counter(gram for words in prompts for gram in set(_grams(words, n)))
    return {gram for gram, count in prompts_with.items() if count > most}


def _evidence(words: Tokens, n: int, boilerplate: set[Tokens]) -> list[Tokens]:
    """The n-grams of a prompt that hold no boilerplate."""
    return [gram for gram in _grams(words, n) if not any(part in boilerplate for part in _grams(gram, n // 2))]
