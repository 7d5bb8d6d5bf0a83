"""What rewards measure on the text of a completion alone: tags, repetition, and what the reasoning concludes."""

from __future__ import annotations

import re
from collections import Counter

from grpo.data.template import STYLES, TAG, tag_sequence


def tags_in_order(text: str) -> bool:
    """Whether the four tags of one style occur one after the other, with anything before, between and after them."""
    return any(_is_subsequence(tag_sequence(style), TAG.findall(text)) for style in STYLES)


def single_tags(text: str) -> float:
    """Share of the four tags that occur exactly once, in the style for which it is larger."""
    counts = Counter(TAG.findall(text))
    return max(sum(counts[tag] == 1 for tag in tag_sequence(style)) / 4 for style in STYLES)


def _is_subsequence(expected: list[str], tags: list[str]) -> bool:
    left = iter(tags)
    return all(tag in left for tag in expected)


# Scripts without spaces between words count by character: kana, Han.
_UNSPACED = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[^\w\s]")


def repeated_ngram_share(text: str, n: int) -> float:
    """Share of n-grams that occurred before in the text: 0 where all differ, towards 1 in a loop; tags do not count.

    The units are words, numbers and signs, and in Chinese and Japanese characters. Fewer than n units: 0.
    """
    units = _WORD.findall(TAG.sub(" ", text).casefold())
    grams = [tuple(units[i : i + n]) for i in range(len(units) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


_BOX = "\\boxed{"
_NUMBER = r"(?:(?<![\w)])[-+−])?(?<![\w.])[$€£¥]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?"
# "the answer is ...", "Ergebnis: ...": the languages of most problem sets. Without a verb or a colon, as in "ist das
# Ergebnis 7", a value must follow, so that "the answer must be even" states nothing.
_STATED = re.compile(
    r"(?:\b(?:answer|result|option|choice|antwort|ergebnis|réponse|résultat|respuesta|resultado|risultato|ответ)\b"
    r"|答案|结果|答え)"
    r"(?:\s*(?:\b(?:is|ist|est|es|è)\b|[:：=是为為はー—])[ \t]*|\s+(?=[-−$\\\d]))",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?;](?=\s|$)|[。！？；]")


def conclusions(reasoning: str) -> list[str]:
    r"""What the reasoning ends in, as the texts that may be read as its result; empty if it ends in nothing.

    The last \boxed{} if there is one. Else the last sentence that states a result ("the answer is ..."): all that it
    states, what follows its last equals sign, and the first number there. Else the last number of all and what
    follows the last equals sign in the last line.
    """
    if box := _last_box(reasoning):
        return [box]
    if statements := list(_STATED.finditer(reasoning)):
        line = reasoning[statements[-1].end() :].partition("\n")[0]
        stated = _SENTENCE_END.split(line, maxsplit=1)[0].strip()
        return [stated, _right_side(stated), *re.findall(_NUMBER, _right_side(stated))[:1]]
    lines = reasoning.strip().splitlines()
    return [*re.findall(_NUMBER, reasoning)[-1:], *(_right_side(line) for line in lines[-1:])]


def _right_side(text: str) -> str:
    return text.rsplit("=", 1)[-1].strip(" \t.$")


def _last_box(text: str) -> str | None:
    start = text.rfind(_BOX) + len(_BOX)
    depth = 1
    for end in range(start, len(text) if start >= len(_BOX) else 0):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip()
    return None
