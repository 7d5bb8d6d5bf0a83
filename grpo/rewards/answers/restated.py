r"""Answers that copy a calculation from the question.

``37 \cdot 43`` has the value that "What is $37 \cdot 43$?" asks for, and so has ``x^2-5x+6`` after "Factor x^2-5x+6".
Such an answer shows nothing. A number, a name or a fraction of two of them may stand in the question and be right.
"""

from __future__ import annotations

import re

from grpo.rewards.answers.claim import claim, compatible, sides

_UNSEEN = re.compile(r"\\[,;:! ()\[\]]|\\(?:q?quad|left|right|displaystyle|limits)(?![a-z])|[ ~$]")
_SPELLINGS = {
    re.compile(r"\\(?:times|cdot)(?![a-z])|[×·⋅∗]"): "*",
    re.compile(r"\\div(?![a-z])"): "÷",
    re.compile(r"[−–]"): "-",
    re.compile(r"\\in(?![a-z])"): "∈",
    re.compile(r"\\[dtc]frac(?![a-z])"): r"\\frac",
}
_OPERATION = re.compile(
    r"[*÷^!|√∑∫∏]|(?<=[\w)}\]])[-+(]|\\(?:frac|sqrt|d?binom|sum|prod|i*int|oint|lim|log|ln|exp|sin|cos|tan|cot|sec|csc"
    r"|arc[a-z]{3}|gcd|lcm|max|min|det|[bp]?mod|partial|nabla|l?vert|lfloor|lceil|operatorname)(?![a-z])"
)
_WHOLE = r"(?:\{(-?[0-9]{1,50})\}|([0-9]))"
_DIVISION = re.compile(rf"\\frac{_WHOLE}{_WHOLE}|(?<![\w.])(-?[0-9]{{1,50}})/([0-9]{{1,50}})(?![\w.])")
_PART = r"\{-?(?:[0-9.,]++|[a-z]|\\[a-z]++)\}"
# Holds an operator, but no calculation: a fraction of two numbers or names, 1.6 * 10^{-19}, 90^\circ, 5 cm^2.
_VALUE = re.compile(
    rf"\\frac(?:{_PART}{_PART}|[0-9][0-9])|(?<=[0-9])\*10\^(?:\{{-?[0-9]++\}}|-?[0-9]++)|\^(?:\{{\\circ\}}|\\circ)"
    r"|(?<=[a-z][a-z])\^\{?[23]\}?"
)


def restated(question: str, gold: str, answer: str) -> bool:
    """Whether the answer, or each side of its equation, is a calculation that stands in the question, and not the gold
    answer's text."""
    claimed, expected = claim(answer), claim(gold)
    if claimed is None or expected is None:
        return False
    wanted = {_bare(part) for part in (expected, *sides(expected, symbolic=True)[1])}
    asked = _bare(compatible(question))

    def copied(part: str) -> bool:
        return _calculates(part) and _bare(part) in asked and _bare(part) not in wanted

    return copied(claimed) or all(map(copied, sides(claimed, symbolic=True)[1]))


def _calculates(text: str) -> bool:
    """Whether a text holds something to calculate. 84/2, which is a whole number, is a calculation; 1/2 is a value."""
    text = _seen(text)
    for division in _DIVISION.finditer(text):
        above, below = (int(part) for part in division.groups() if part is not None)
        if below and above % below == 0:
            return True
    return bool(_OPERATION.search(_VALUE.sub("1", text)))


def _bare(text: str) -> str:
    """The text as it is compared: without spaces, delimiters and braces, and with one spelling of each operator."""
    return _seen(text).replace("{", "").replace("}", "")


def _seen(text: str) -> str:
    text = _UNSEEN.sub("", text.casefold())
    for spelling, plain in _SPELLINGS.items():
        text = spelling.sub(plain, text)
    return text
