"""Measures of a completion's text: tags, repetition, and the conclusion of the reasoning."""

from __future__ import annotations

import re
from collections import Counter

from grpo.data.template import BOX, STYLES, TAG, AnswerForm, last_box, tag_sequence

_BOXED = "\\boxed{"
_MARK = re.compile(rf"{TAG.pattern}|{BOX.pattern}")


def marks_in_order(text: str, form: AnswerForm) -> bool:
    """Whether the marks of the form occur in order, with any text before, between and after them."""
    return any(_is_subsequence(marks, _marks(text)) for marks in _sequences(form))


def single_marks(text: str, form: AnswerForm) -> float:
    """Share of the form's marks that occur exactly once; if there are several ways to mark, the largest share."""
    counts = Counter(_marks(text))
    return max(sum(counts[mark] == 1 for mark in marks) / len(marks) for marks in _sequences(form))


def _sequences(form: AnswerForm) -> list[list[str]]:
    """The ways to mark reasoning and answer in a form: four tags, or two tags and, if the answer is boxed, a box."""
    tagged = [tag_sequence(style) for style in STYLES]
    summed_up = [[*tags[:2], *([] if form.whole else [_BOXED])] for tags in tagged]
    return {"tags": tagged, "boxed": summed_up, "auto": tagged + summed_up}[form.style]


def _marks(text: str) -> list[str]:
    return [_BOXED if mark[0] == "\\" else mark for mark in _MARK.findall(text)]


def _is_subsequence(expected: list[str], tags: list[str]) -> bool:
    left = iter(tags)
    return all(tag in left for tag in expected)


# Scripts without spaces between words count by character: kana, Han.
_UNSPACED = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[^\w\s]")


def repeated_ngram_share(text: str, n: int) -> float:
    """Share of n-grams that occurred earlier in the text: 0 if all differ, close to 1 in a loop. Ignores tags.

    The units are words, numbers and signs; in Chinese and Japanese, characters. Fewer than n units: 0.
    """
    units = _WORD.findall(TAG.sub(" ", text).casefold())
    grams = [tuple(units[i : i + n]) for i in range(len(units) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


_NUMBER = r"(?:(?<![\w)])[-+−])?(?<![\w.])[$€£¥]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?"
# "the answer is ...", "Ergebnis: ...", in the languages of most problem sets. Without a verb or a colon, as in "ist das
# Ergebnis 7", a value must follow, so that "the answer must be even" does not match.
_STATED = re.compile(
    r"(?:\b(?:answer|result|option|choice|antwort|ergebnis|réponse|résultat|respuesta|resultado|risultato|ответ)\b"
    r"|答案|结果|答え)"
    r"(?:\s*(?:\b(?:is|ist|est|es|è)\b|[:：=是为為はー—])[ \t]*|\s+(?=[-−$\\\d]))",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?;](?=\s|$)|[。！？；]")


def conclusions(reasoning: str) -> list[str]:
    r"""The conclusion of the reasoning: texts that may be read as its result; empty if there is none.

    The last \boxed{} if there is one. Else, from the last sentence that states a result ("the answer is ..."): the
    whole statement, what follows its last equals sign, and its first number. Else the last number in the text and what
    follows the last equals sign in the last line.
    """
    if box := last_box(reasoning):
        return [box]
    if statements := list(_STATED.finditer(reasoning)):
        line = reasoning[statements[-1].end() :].partition("\n")[0]
        stated = _SENTENCE_END.split(line, maxsplit=1)[0].strip()
        return [stated, _right_side(stated), *re.findall(_NUMBER, _right_side(stated))[:1]]
    lines = reasoning.strip().splitlines()
    return [*re.findall(_NUMBER, reasoning)[-1:], *(_right_side(line) for line in lines[-1:])]


def before_result(text: str) -> str:
    """The lines before the one that states the last result ("the answer is ..."); all lines if none does."""
    stated = [*_STATED.finditer(text)]
    return text[: text.rfind("\n", 0, stated[-1].start()) + 1] if stated else text


def _right_side(text: str) -> str:
    return text.rsplit("=", 1)[-1].strip(" \t.$")
