"""Decontamination: drops training texts that share ten words in a row with a held-out prompt.

Departure from the paper, which says only "10-gram match": text that held-out problems share with each other is a
template ("State the final answer to the following arithmetic problem: ...") and proves nothing. So an n-gram is ignored
if it is boilerplate or contains boilerplate. Boilerplate is detected in grams of n // 2 tokens: a template of nine
words contains no 10-gram of its own, yet any two problems that continue it with the same number would collide. Equality
of all tokens is always a collision, template or not, and so is the same calculation in other words
(tasks/problems/normal_form.py). A completion that works out a held-out calculation of three or more numbers also
collides.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from grpo.data.records import Problem
from grpo.errors import InputError
from tasks.problems.normal_form import long_calculations, normal_form

Tokens = tuple[str, ...]

BOILERPLATE_MIN = 3
"""Number of held-out problems that may share a gram, however few problems there are, before it counts as
boilerplate."""

_IDEOGRAPH = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
# Scripts without spaces: each character is a token. Numbers keep their decimals. Operators are tokens; other
# punctuation is not.
_TOKEN = re.compile(rf"[{_IDEOGRAPH}]|\d+(?:\.\d+)?|[^\W\d_{_IDEOGRAPH}]+|[-+*/=<>^%\u00d7\u00f7\u2212\u2264\u2265]")


@dataclass(frozen=True)
class Collision:
    """A dropped training problem, the held-out problem that it matched, and the tokens they share."""

    train_id: str
    held_out_id: str
    shared: str


@dataclass(frozen=True)
class Match:
    """The overlap of a text with a held-out prompt: all of its tokens or its calculation ("equal"), or n tokens in a
    row ("overlapping")."""

    kind: Literal["equal", "overlapping"]
    held_out_id: str
    shared: str


class HeldOut:
    """Held-out problems, indexed once, for comparison with any number of texts.

    Prompts shorter than `n` tokens match only if all their tokens are equal. A gram is boilerplate if more than max(3,
    `boilerplate_share` x number of held-out problems) of them contain it. Each of the `sets` has boilerplate of its
    own: counted among thousands of other problems, a template of a few would be evidence.
    """

    def __init__(self, *sets: Sequence[Problem], n: int = 10, boilerplate_share: float = 0.01):
        if n < 2:
            raise InputError(f"n is {n}; matching needs grams of at least 2 tokens, the paper's is 10")
        if not 0 <= boilerplate_share <= 1:
            raise InputError(f"boilerplate_share is {boilerplate_share}; it is a share between 0 and 1")
        self.n = n
        self.boilerplate = 0
        self._whole: dict[Tokens, str] = {}
        self._forms: dict[str, str] = {}
        self._calculations: dict[str, str] = {}
        self._parts: dict[Tokens, str] = {}
        for problems in sets:
            self._add(problems, boilerplate_share)

    def _add(self, problems: Sequence[Problem], boilerplate_share: float) -> None:
        n = self.n
        prompts = [tokens(problem.text) for problem in problems]
        boilerplate = _boilerplate(prompts, n // 2, max(BOILERPLATE_MIN, boilerplate_share * len(problems)))
        self.boilerplate += len(boilerplate)
        for problem, words in zip(problems, prompts, strict=True):
            self._whole.setdefault(words, problem.id)
            self._forms.setdefault(normal_form(problem.text), problem.id)
            for calculation in long_calculations(problem.text):
                self._calculations.setdefault(calculation, problem.id)
            for gram in _evidence(words, n, boilerplate):
                self._parts.setdefault(gram, problem.id)

    def match_prompt(self, text: str) -> Match | None:
        """The first held-out prompt that equals this one, or else the first that shares n tokens in a row with it."""
        words = tokens(text)
        if words in self._whole:
            return Match("equal", self._whole[words], " ".join(words))
        if (form := normal_form(text)) in self._forms:
            return Match("equal", self._forms[form], form)
        return self._overlap(words)

    def match_passage(self, text: str) -> Match | None:
        """Like `match_prompt`, for a text that is not a prompt, such as a completion. There, equality alone means
        nothing, but a long calculation does."""
        for calculation in long_calculations(text) if self._calculations else ():
            if calculation in self._calculations:
                return Match("equal", self._calculations[calculation], calculation)
        return self._overlap(tokens(text))

    def _overlap(self, words: Tokens) -> Match | None:
        # No indexed gram contains boilerplate of its set, so the text need not be searched for it.
        if self._parts.keys().isdisjoint(_grams(words, self.n)):
            return None
        gram = next(gram for gram in _grams(words, self.n) if gram in self._parts)
        return Match("overlapping", self._parts[gram], " ".join(gram))


def decontaminate(
    train: Sequence[Problem],
    held_out: Sequence[Problem],
    n: int = 10,
    *,
    boilerplate_share: float = 0.01,
    examples: int = 10,
) -> tuple[list[Problem], dict[str, int], list[Collision]]:
    """Compares training problems with `HeldOut` ones. Returns (kept, counts, the first `examples` collisions).

    Counts: train = kept + equal + overlapping; and boilerplate, the number of distinct grams ignored as such.
    """
    index = HeldOut(held_out, n=n, boilerplate_share=boilerplate_share)
    kept: list[Problem] = []
    collisions: list[Collision] = []
    counts = {"train": len(train), "kept": 0, "equal": 0, "overlapping": 0, "boilerplate": index.boilerplate}
    for problem in train:
        match = index.match_prompt(problem.text)
        counts[match.kind if match else "kept"] += 1
        if match is None:
            kept.append(problem)
        elif len(collisions) < examples:
            collisions.append(Collision(problem.id, match.held_out_id, match.shared))
    return kept, counts, collisions


def tokens(text: str) -> Tokens:
    """Lower-case words, numbers and operators: "What is 3.5 + 2x?" becomes what, is, 3.5, +, 2, x. Unicode is composed
    first: an accent of its own would split its word."""
    return tuple(_TOKEN.findall(unicodedata.normalize("NFC", text).lower()))


def _grams(words: Tokens, n: int) -> Iterator[Tokens]:
    return zip(*(words[i:] for i in range(n)), strict=False)


def _boilerplate(prompts: Sequence[Tokens], n: int, most: float) -> set[Tokens]:
    # Counted once per prompt: repetition within one problem does not make a template.
    prompts_with = Counter(gram for words in prompts for gram in set(_grams(words, n)))
    return {gram for gram, count in prompts_with.items() if count > most}


def _evidence(words: Tokens, n: int, boilerplate: set[Tokens]) -> list[Tokens]:
    """The n-grams of a prompt that contain no boilerplate."""
    return [gram for gram in _grams(words, n) if not any(part in boilerplate for part in _grams(gram, n // 2))]
