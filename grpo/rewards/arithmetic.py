"""Exact values of the arithmetic in a line of text. Model output is never given to `eval`.

Expressions with variables, units or functions have no value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_TOKENS = 100
MAX_DIGITS = 50
MAX_BITS = 10_000
"""Limits on the length of an expression, on its numbers and on intermediate values; beyond them it has no value."""

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?%?|\.\d+%?"
_TOKEN = re.compile(rf"\*\*|[-+*/^()]|{_NUMBER}")
_RUN = re.compile(rf"(?<![\w.])(?:{_NUMBER})(?: ?(?:[-+*/^()=]|{_NUMBER}))*|[-+*/^()=](?: ?(?:[-+*/^()=]|{_NUMBER}))*")
_OPERAND = re.compile(_NUMBER)
_SPELLINGS = {
    **dict.fromkeys(("×", "·", "\\times", "\\cdot"), "*"),
    **dict.fromkeys(("÷", "\\div"), "/"),
    **dict.fromkeys(("−", "–"), "-"),
    **dict.fromkeys(("\\%",), "%"),
    **dict.fromkeys(("\\$", "$", "€", "£", "¥", "\\left", "\\right", "\\(", "\\)", "\\[", "\\]"), ""),
    **dict.fromkeys(("\\,", "\\!", "{,}"), ""),
}
_SPELLING = re.compile("|".join(re.escape(s) + (r"(?![a-zA-Z])" if s[-1].isalpha() else "") for s in _SPELLINGS))
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_POWER = re.compile(r"\^\{([^{}]*)\}")
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_UNKNOWN = re.compile(r"\w| ?[\\{\[_]")
_LIST_MARK = re.compile(r"^(?:[-*•]|\d{1,3}[.)]) ")


@dataclass(frozen=True)
class Side:
    """One side of an equation, or a single expression. `decimals`: decimal places of a plain number such as 3.50, else
    0."""

    value: Fraction | None
    decimals: int = 0


def chains(line: str) -> list[list[Side]]:
    """The expressions of a line, in order, each as its sides: "8 - 1 = 7" has two sides, "8 - 1" has one. Reads plain
    and LaTeX notation. Skips a list mark at the start of the line."""
    text = _LIST_MARK.sub("", " ".join(_plain(line).split()))
    return [_sides(text, run.start(), run.end()) for run in _RUN.finditer(text)]


def expressions(line: str) -> list[str]:
    """The calculations of a line, in order and without spaces: "compute 4 - 1 = 3" has "4-1". Excludes single numbers
    and expressions without a value."""
    text = _LIST_MARK.sub("", " ".join(_plain(line).split()))
    found = []
    for run in _RUN.finditer(text):
        parts = re.split("=+", run[0])
        for part, side in zip(parts, _sides(text, run.start(), run.end()), strict=True):
            if side.value is not None and len(_OPERAND.findall(part)) > 1:
                found.append(part.replace(" ", ""))
    return found


def agree(one: Side, other: Side) -> bool:
    """Whether the values are equal. A plain number with decimals may be the other value rounded to as many places, so
    that 10 / 3 = 3.33."""
    assert one.value is not None and other.value is not None
    off = abs(one.value - other.value)
    return off == 0 or any(side.decimals and off <= Fraction(1, 2 * 10**side.decimals) for side in (one, other))


def value(expression: str) -> Fraction | None:
    """The value of an expression of numbers, + - * / ^ and brackets; None if it is not one or exceeds the limits."""
    tokens = _TOKEN.findall(expression)
    if len(tokens) > MAX_TOKENS or "".join(tokens) != expression.replace(" ", ""):
        return None
    try:
        return _Evaluator(tokens).result()
    except _Unreadable:
        return None


def _plain(line: str) -> str:
    text = _SPELLING.sub(lambda match: _SPELLINGS[match[0]], line)
    text = _POWER.sub(r"^(\1)", _FRACTION.sub(r"((\1)/(\2))", text))
    return _BOX.sub(r"\1", text)


def _sides(text: str, start: int, end: int) -> list[Side]:
    run = text[start:end]
    sides = [_side(part.strip()) for part in re.split("=+", run)]
    # "f(2)", "x-3" and "x - 3" start with something unknown; "then -3" does not.
    signed = run[0] in "+-" and run[1:2] != " "
    if text[start - 1 : start].isalnum() or (run[0] in "+-" and not signed and start > 0):
        sides[0] = Side(None)
    # "2x", "7kg", "2 \\pi", "3 (" end with something unknown.
    if _UNKNOWN.match(text, end):
        sides[-1] = Side(None)
    return sides


def _side(part: str) -> Side:
    plain = re.fullmatch(_NUMBER, part) and "%" not in part
    return Side(value(part), len(part.partition(".")[2]) if plain else 0)


class _Unreadable(Exception):
    pass


class _Evaluator:
    """Recursive descent over tokens: a sum of products of signed powers."""

    def __init__(self, tokens: list[str]):
        self.tokens = tokens
        self.at = 0

    def result(self) -> Fraction:
        value = self.sum()
        if self.at < len(self.tokens):
            raise _Unreadable
        return value

    def take(self, *options: str) -> str | None:
        """The next token, if it is one of these."""
        if self.at < len(self.tokens) and self.tokens[self.at] in options:
            self.at += 1
            return self.tokens[self.at - 1]
        return None

    def sum(self) -> Fraction:
        value = self.product()
        while operator := self.take("+", "-"):
            term = self.product()
            value = _limited(value + term if operator == "+" else value - term)
        return value

    def product(self) -> Fraction:
        value = self.signed()
        while operator := self.take("*", "/"):
            factor = self.signed()
            if operator == "/" and factor == 0:
                raise _Unreadable
            value = _limited(value * factor if operator == "*" else value / factor)
        return value

    def signed(self) -> Fraction:
        if sign := self.take("+", "-"):
            return self.signed() if sign == "+" else -self.signed()
        return self.power()

    def power(self) -> Fraction:
        base = self.operand()
        if not self.take("^", "**"):
            return base
        exponent = self.signed()
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator != 1 or abs(exponent) * bits > MAX_BITS or (base == 0 and exponent < 0):
            raise _Unreadable
        return base ** int(exponent)

    def operand(self) -> Fraction:
        if self.take("("):
            value = self.sum()
            if not self.take(")"):
                raise _Unreadable
            return value
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        digits = token.rstrip("%").replace(",", "")
        if not digits[-1:].isdigit() or len(digits) > MAX_DIGITS:
            raise _Unreadable
        self.at += 1
        return Fraction(digits) / (100 if token.endswith("%") else 1)


def _limited(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _Unreadable
    return value
