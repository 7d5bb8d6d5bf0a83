r"""Equality of mathematical expressions, by math-verify. An answer may give only one expression.

math-verify searches a text for expressions and compares all pairs. A policy would learn to list several, or to write an
equation whose right side is a guess. Therefore the one expression is extracted here first.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

from grpo.rewards.answers.claim import DENIED, SIMPLE_NAME, claim, sides
from grpo.rewards.answers.golds import is_words, well_formed
from grpo.rewards.evaluation_guard import EvaluationRefused, no_evaluation
from grpo.rewards.expressions import numeral

MAX_CHARACTERS = 1_000
"""Maximum length of a parsed answer, or twice the reference's length if that is more: math-verify's time is not
linear."""
MAX_DEPTH, MAX_SIDES = 50, 5
_SPACING = ("\\,", "\\;", "\\:", "\\!", "\\qquad", "\\quad")
_PERCENT = re.compile(r"(?<![0-9.,])((?:[0-9][0-9,]*+)?(?:\.[0-9]++)?)(?<=[0-9]) ?\\?%")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:,|\{,\}|\\[,!;:]|~)[0-9]{3})++(?![0-9])")
_DECIMAL_COMMA = re.compile(r"(?<![0-9.,])0(?:,|\{,\})(?=[0-9]++(?![0-9,]))")
_SPACED_DIGITS = re.compile(r"[0-9](?: |~|\\[,;:! ]|\\q?quad)++[0-9.]")
_SEVERAL = re.compile(
    r"(?<!\\)[,;]|\n|\\\\|\\q?quad\b|\\(?:lor|vee|land|wedge|pm|mp|newline|cr)\b|\b(?:or|and|oder|und|ou|et)\b|[∨∧±…]"
    r"|\.\.|\\[lcd]?dots\b"
)
_RELATION = re.compile(
    r"\\(?:l(?:t|eq?|eqslant)|g(?:t|eq?|eqslant)|approx|sim|simeq|equiv|cong|to|in|notin)\b|[<>≤≥≈∈→]"
)
# Text that math-verify drops as a unit, although it changes the value or puts it in doubt; and a base other than ten.
_NO_UNIT = re.compile(
    r"\\(?:text\w*+|math\w++|mbox|rm|operatorname) ?\{[^{}]*?(?<![a-zA-Z])"
    r"(?:(?i:hundreds?|thousands?|millions?|billions?|trillions?|dozens?|gross|lakhs?|crores?|halves|half"
    r"|squared|cubed|maybe|perhaps|possibly|probably|about|around|roughly|approximately|not)|k|i|j)(?![a-zA-Z])"
    r"|[0-9]\}?_(?!\{?10(?![0-9]))"
)
_PLAIN_NUMBER = re.compile(r"[-+]?[0-9.]++")
_ROUNDED = re.compile(r"(?:\\approx\b|≈) ?-?[0-9]++(?:\.[0-9]++)?$")
_COMMAND = re.compile(r"\\[a-zA-Z]++")
_LETTER = re.compile(r"[a-zA-Z]")
_EQUALS = re.compile(r"=|\\(?:approx|eq)\b|≈")
_MEMBER = re.compile(r"[A-Za-z] ?(?:\\in\b|∈) ?")
_UNORDERED = re.compile("Invalid (?:NaN )?comparison")
_INTERVAL = re.compile(r"\\infty|\\cup|[<>≤≥∞]|\\[lg](?:t|e)")
_COMMA = re.compile(r"(?<!\\),")
CLOSE = 1e-5
"""Relative difference of numbers that are equal after rounding. It allows for six decimals of a number from 0.05 up."""


def equal(reference: str, answer: str) -> bool:
    r"""Whether the answer is one expression with the reference's value.

    An equation such as ``x = 3 + 4 = 7`` is right if all its sides are, except for a name in front. ``\neq 42`` and
    ``7 = 42`` are not 42; ``42\%`` is 0.42.

    Raises:
        EvaluationRefused: math-verify would evaluate part of the reference.
    """
    if len(answer) > max(MAX_CHARACTERS, 2 * len(reference)) or _too_deep(answer):
        return False
    claimed = claim(answer)
    if claimed is None:
        return False
    claimed, gold = _digits(claimed), claim(reference)
    gold = None if gold is None else _digits(gold)
    with no_evaluation() as refusals:
        if gold is None:  # if the reference marks several things, math-verify reads it
            return _same(_gold(reference, refusals), claimed)
        if claimed.casefold() == gold.casefold():
            return True
        if _claims_more(claimed, gold):
            return False
        name, expected = sides(gold, symbolic=True)
        if len(expected) > 1 or _relates(gold) or (name and not SIMPLE_NAME.fullmatch(name)):
            return _same(_gold(f"${gold}$", refusals), claimed)
        if not _PLAIN_NUMBER.fullmatch(expected[0]):
            claimed = _ROUNDED.sub("", claimed)
        if _SEVERAL.search(gold) and claimed.count("=") > 1:
            claimed = _unnamed(claimed)
        given, parts = sides(
            _EQUALS.sub("=", claimed), symbolic=_LETTER.search(_COMMAND.sub("", expected[0])) is not None
        )
        if name and given and name != given:  # another equation, or the same one under another name
            return not SIMPLE_NAME.fullmatch(given) and _same(_gold(f"${gold}$", refusals), claimed)
        if len(parts) > MAX_SIDES or not all(parts):
            return False
        value = _gold(f"${expected[0]}$", refusals)
        return all(_same(value, _MEMBER.sub("", part, count=1)) for part in parts)


def usable(reference: str) -> bool:
    """Whether answers can be compared with a reference: it has a value, or is text that nothing is missing from.

    Compares it with an answer, because some references can be read, but compared with nothing in reasonable time; the
    caller limits time.

    Raises:
        EvaluationRefused: math-verify would evaluate part of it.
    """
    claimed = claim(reference)
    with no_evaluation() as refusals:
        parsed = _gold(reference if claimed is None else f"${_digits(claimed)}$", refusals)
        if all(isinstance(part, str) for part in parsed):
            return well_formed(reference) or is_words(reference)
        try:
            has_value = _math_verify()[1](parsed, parsed)
        except ValueError:
            return False
    equal(reference, "5")
    return bool(has_value)


def _unnamed(claimed: str) -> str:
    """``x = 1, x = 2`` and ``x = 1 \\text{ or } x = 2`` as ``1, 2``; an equation of numbers stays one."""
    values = [sides(item) for item in _SEVERAL.split(claimed.replace("\\text", "").replace("{", "").replace("}", ""))]
    return ", ".join(parts[0] if name or len(parts) == 1 else " = ".join(parts) for name, parts in values)


def _too_deep(text: str) -> bool:
    return any(text.count(bracket) > MAX_DEPTH for bracket in "({[") or "\\left" * 2 in text


def _digits(text: str) -> str:
    """Removes thousands separators and currency signs from digits, and converts percent to hundredths."""
    text = text.replace("\\$", "").replace("$", "").rstrip(" ~")
    for mark in _SPACING:
        text = text.removesuffix(mark).rstrip(" ~")
    text = _THOUSANDS.sub(lambda match: re.sub(r"[^0-9]", "", match[0]), text)
    return _PERCENT.sub(r"\\frac{\1}{100}", _DECIMAL_COMMA.sub("0.", text))


def _claims_more(claimed: str, gold: str) -> bool:
    """Whether the answer contains a negation, a relation or a list where the reference does not."""
    denied = DENIED.search(claimed) and not DENIED.search(gold)
    name, equals, rest = claimed.partition("=")
    if equals and SIMPLE_NAME.fullmatch(name.strip()):
        claimed = rest
    if _SPACED_DIGITS.search(claimed) or "%" in claimed.replace("\\%", "%").replace(gold, ""):
        return True
    related = _RELATION.search(_EQUALS.sub("=", _MEMBER.sub("", claimed, count=1)))
    return any(
        (
            denied,
            _NO_UNIT.search(claimed) and not _NO_UNIT.search(gold),
            _SEVERAL.search(claimed) and not (_SEVERAL.search(gold) or _is_interval(gold)),
            related and not (_relates(gold) or _is_interval(gold)),
        )
    )


def _is_interval(gold: str) -> bool:
    return bool(_INTERVAL.search(gold) or (_COMMA.search(gold) and ("[" in gold or "(" in gold)))


def _relates(gold: str) -> bool:
    return bool(_RELATION.search(gold) or DENIED.search(gold))


def _gold(text: str, refusals: list[EvaluationRefused]) -> Any:
    parsed = _math_verify()[0](text)
    if refusals:
        raise refusals[0]  # math-verify would continue without the part that it could not read
    return parsed


def _same(gold: Any, expression: str) -> bool:
    """Whether math-verify finds them equal. Its ValueError means no expression or no value, such as 1/0, and sympy's
    TypeError of a comparison a value without an order, such as 0 * oo or 2i in a set. Other errors are raised."""
    parse, same = _math_verify()
    try:
        return same(gold, parse(f"${expression}$"))
    except ValueError:
        return False
    except TypeError as error:
        if _UNORDERED.match(str(error)):
            return False
        raise


def _with_commas(digits: str) -> Any:
    """1,000 is a thousand and 0,5 is a half, as in math-verify."""
    if digits.startswith("0"):
        digits = digits.replace(",", ".")
    return numeral(re.sub("[, ]", "", digits).lstrip("0") or "0")


def _is_close(one: Any, other: Any) -> bool:
    """Whether two numbers differ by at most `CLOSE` of the larger; True for everything that is not a number.

    math-verify rounds to six decimals, so that 0.333333 is a third. It finds all numbers below 5e-7 equal, and zero.
    Here the square root of 2 is still 1.414214 and 1/15 is 0.066667, but 2.5e-6 is not 2e-6, and only zero is zero.
    """
    if one == other or not (getattr(one, "is_number", False) and getattr(other, "is_number", False)):
        return True
    one, other = one.doit().evalf(20), other.doit().evalf(20)
    try:
        return bool(abs(one - other) <= CLOSE * max(abs(one), abs(other)))
    except TypeError:  # infinity has no difference
        return True


@functools.cache
def _math_verify() -> tuple[Callable[[str], Any], Callable[[Any, Any], bool]]:
    import math_verify
    from latex2sympy2_extended import latex2sympy2
    from math_verify import grader

    # Its own version passes the digits to sympy.Number, which evaluates text.
    latex2sympy2._Latex2Sympy.parse_number = lambda _, digits: numeral(digits.replace(",", ""))
    latex2sympy2.convert_number = _with_commas

    rounded = grader.sympy_numeric_eq
    grader.sympy_numeric_eq = lambda one, other, *precision: rounded(one, other, *precision) and _is_close(one, other)

    # Silences its warning that time limits are off, once per process; the caller limits time.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    latex = math_verify.LatexExtractionConfig()

    def parse(text: str) -> Any:
        # Outside dollar signs math-verify looks for a number in prose, and would read 3 from 3\pi. Its parser for plain
        # expressions evaluates them as Python (sympy's parse_expr); its LaTeX parser uses a grammar.
        marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
        return math_verify.parse(text if marked else f"${text}$", [latex], parsing_timeout=None, raise_on_error=True)

    return parse, functools.partial(math_verify.verify, timeout_seconds=None, raise_on_error=True)
