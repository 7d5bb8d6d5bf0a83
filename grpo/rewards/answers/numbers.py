"""The exact value of a number in an answer."""

from __future__ import annotations

import re
from fractions import Fraction

from grpo.rewards.answers.claim import DENIED, SIMPLE_NAME, claim, sides

_FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9.]++)\}\{(-?[0-9.]++)\}")
_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]++)(?:\.[0-9]*+)?|\.[0-9]++"
# Three exponent digits are enough for any answer; more would let a short answer fill the memory.
_NUMBER = re.compile(rf"([+-]?)({_DECIMAL})(e[+-]?[0-9]{{1,3}})?(?:/([+-]?)({_DECIMAL}))?(%?)", re.IGNORECASE)
_MAX_CHARACTERS = 200
_THIN_SPACE = re.compile(r"(?<=[0-9])(?: |\\[,!;]|\{,\})(?=[0-9]{3}(?![0-9]))")
_AROUND_SIGN = re.compile(r" ?([-+/%$€£¥]) ?")


def value(text: str) -> Fraction | None:
    """The value of a number, alone or after a lead-in; None if there is no number, or several.

    "1,000", "$5", "7/2", "50%", "1.2e3", "the result is 42" and "x = 42" have a value; "7 = 42" and "4 2" do not.
    """
    claimed = claim(text)
    if claimed is None or len(claimed) > _MAX_CHARACTERS:
        return None
    name, parts = sides(claimed)
    if DENIED.search(claimed) or (name and not SIMPLE_NAME.fullmatch(name)):
        return None
    values = {_plain(side) for side in parts}
    return values.pop() if len(values) == 1 else None


def _plain(text: str) -> Fraction | None:
    text = text.replace("\u2212", "-").replace("\\%", "%").replace("\\$", "$")
    text = _FRACTION.sub(r"\1/\2", text)
    text = _AROUND_SIGN.sub(r"\1", _THIN_SPACE.sub("", text)).strip()
    match = _NUMBER.fullmatch(re.sub(r"[$€£¥]", "", text))
    if match is None:
        return None
    sign, digits, exponent, below_sign, below, percent = match.groups()
    value = Fraction(sign + digits.replace(",", "").rstrip(".") + (exponent or ""))
    if below:
        divisor = Fraction(below_sign + below.replace(",", "").rstrip("."))
        if divisor == 0:
            return None
        value /= divisor
    return value / 100 if percent else value
