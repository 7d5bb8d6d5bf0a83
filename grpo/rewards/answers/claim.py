r"""Extracts the one claim of an answer, without the markup and words around it.

"**The result is $x = 42$.**" claims ``x = 42``. An answer that marks several things as its result claims nothing. Every
text is read in time linear in its length, so that a policy that repeats a character cannot block a group's scoring.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from itertools import islice

_OTHER_MEANING = ("<super>", "<sub>", "<fraction>")
"""Unicode compatibility forms whose meaning differs from the plain character: 4² is not 42."""
MAX_CHARACTERS = 10_000
"""Maximum length of a text that can claim something."""
_ROUNDS = 8
"""Maximum number of nested wrappers that are removed: **$\\boxed{\\text{(B)}}$** has four."""
_LEADS = 3
"""Maximum number of lead-ins that are removed: "So the answer is: **it is 42**" has two."""
_WRAPPER = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|displaystyle)(?![a-zA-Z]) ?")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_CURRENCY = re.compile(r"\$ ?[0-9.]|[0-9] ?\$")
_BOX = re.compile(r"\\(?:boxed|fbox) ?(?=\{)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_NOUN = (
    r"(?:answer|result|solution|value|total|sum|antwort|ergebnis|lösung|réponse|résultat|respuesta|resultado"
    r"|risposta|risultato|ответ|答案|结果|答え)"
)
_VERB = r"(?:is equal to|is given by|is|equals|ist|lautet|est|es|è|是|为|為|は)"
# For text with single spaces. At most a few words, then a lead-in to a result; "the answer is not 42" leaves "not 42".
_LEAD = re.compile(
    r"(?:(?:so|thus|therefore|hence|finally|also|daher|donc),? ?)?"
    r"(?:"
    rf"(?:(?:the|my|our|die|das|la|le|el|il) ?)?(?:(?:final|correct|right|exact|numerical) ?){{0,2}}{_NOUN} ?"
    rf"(?:{_VERB} ?[:：]?|[:：=])"
    r"|(?:it|this|that|which) (?:is|equals|makes)|(?:we|i) (?:get|have|find|obtain)|="
    r")(?![a-z]) ?",
    re.IGNORECASE,
)


def compatible(text: str) -> str:
    """Normalizes text: full-width digits, ligatures and other compatibility forms become the plain character, white
    space becomes single spaces and is stripped."""
    plain = "".join(map(_compatible, text)) if not text.isascii() else text
    return " ".join(unicodedata.normalize("NFC", plain).split())


def _compatible(character: str) -> str:
    if unicodedata.decomposition(character).startswith(_OTHER_MEANING):
        return character
    return unicodedata.normalize("NFKC", character)


def claim(text: str) -> str | None:
    """What the answer states as its result, on one line; None if it marks several things or is very long."""
    if len(text) > MAX_CHARACTERS:
        return None
    text = compatible(text)
    for _ in range(_LEADS):
        before = text
        text = unwrapped(text)
        if (lead := _LEAD.match(text)) and lead.end() < len(text):
            text = text[lead.end() :]
        if text == before:
            break
    for unmark in (_unboxed, _undelimited):
        if (unmarked := unmark(text)) is None:
            return None
        text = unmarked
    return unwrapped(text)


def unwrapped(text: str) -> str:
    """Removes Markdown marks, math delimiters, boxes and periods that enclose the whole text."""
    for _ in range(_ROUNDS):
        before, text = text, text.strip("*`_ \n\t")
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        for opening, closing in _DELIMITERS:
            inner = text[len(opening) : -len(closing)]
            enclosed = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing)
            if enclosed and opening not in inner and closing not in inner:
                text = inner.strip()
        if (wrapper := _WRAPPER.match(text)) and text[wrapper.end() : wrapper.end() + 1] == "{":
            end = closing_brace(text, wrapper.end())
            if end == len(text) - 1:
                text = text[wrapper.end() + 1 : end].strip()
        if text == before:
            break
    return text


def closing_brace(text: str, opening: int) -> int | None:
    """Index of the brace that closes the one at `opening`, or None; escaped braces are ignored."""
    depth = 0
    for brace in _BRACE.finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


def _unboxed(text: str) -> str | None:
    """The text with its only box replaced by the box's content; None if there are several boxes, or one that is not
    closed."""
    boxes = [*islice(_BOX.finditer(text), 2)]
    if not boxes:
        return text
    start, brace = boxes[0].span()
    end = closing_brace(text, brace)
    return text[:start] + text[brace + 1 : end] + text[end + 1 :] if len(boxes) == 1 and end is not None else None


def _undelimited(text: str) -> str | None:
    """The text without its only pair of math delimiters; None if there are several pairs."""
    text = text.replace("\\$", "\0").replace("$$", "$")
    if text.count("$") == 1 and _CURRENCY.search(text):
        text = text.replace("$", "\0")
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        marks = text.count(opening) + (text.count(closing) if closing != opening else 0)
        if marks not in (0, 2):
            return None
        text = text.replace(opening, " ").replace(closing, " ") if marks else text
    return text.replace("\0", "\\$").strip()


_NAME = re.compile(r"\\(?:var)?(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|omega|Delta)")
_UNKNOWN = re.compile(r"\\(?:gcd|lcm|lim|Pr|det|dim|deg|max|min)(?![a-z])")
_TEXT = re.compile(r"\\(?:text|mathrm|mathit|operatorname) ?\{[^{}]*+\}")
_COMMAND = re.compile(r"\\[a-zA-Z]++")
_LETTER = re.compile(r"[^\W\d_]")
SIMPLE_NAME = re.compile(
    r"\\?[a-zA-Z]{1,20}(?:\{[a-zA-Z ]*\})?(?:_\w|_\{[^{}=]*\})?(?:\^\{-1\})?'*+ ?[a-zA-Z]? ?(?:\([^()=]*\))?"
)
"""A name for a value: x, x_1, f'(x), \\alpha, \\text{area}, \\gcd(4, 6), \\lim_{x \\to 0} f(x)."""
DENIED = re.compile(
    r"\\(?:n(?:eq?|ot|eg)|lnot)\b|≠|¬|!\}?=|<>|\b(?:not|but|except|no|none|nothing|never|neither|nor|wrong"
    r"|incorrect|false|nicht|kein|falsch)\b|n['’]t\b",
    re.IGNORECASE,
)
"""Matches a negation: ``\\neq 42``, "not 42"."""
_EQUALS = re.compile(r"\\.|[{}=]", re.DOTALL)
_SCRIPT = re.compile(r"[_^] ?(?:\{[^{}]*+\}|[a-zA-Z0-9]++)")
_STATES = re.compile(r"(?<![\w.])\d|(?<!\\)[,;]|\b(?:or|and|oder|und|ou|et)\b")
"""Matches what a name does not hold: a number of its own, or a mark between several answers."""
_DIGIT = r" ?(?:[1-9]|\{[1-9]\})"
_COEFFICIENT = re.compile(rf"\\[dt]?frac{_DIGIT}{_DIGIT}(?![0-9])|(?<=\}})\{{[1-9]\}}|(?<![\w.])[1-9](?= ?(?:\\pi|\())")
"""Matches a number that belongs to a formula: those of ``\\frac{1}{2}bh``, ``2\\pi r``, ``2(l + w)``."""


def sides(text: str, symbolic: bool = False) -> tuple[str, list[str]]:
    r"""Splits a claim into the name at its start (or "") and the sides of its equation that must all be right.

    ``x = 3 + 4 = 7`` has the name x and two sides; ``7`` and ``AB = CD = 7`` have one side. `symbolic`: the expected
    value contains variables, so only the first side can be a name. ``x = 41 or x = 42`` has the sides 41 or x, and 42.
    """
    every = [side.strip(" &") for side in _split(text)]
    first, last = every[0], every[-1]
    if len(every) == 1:
        return "", every
    rest = every[1:-1] if symbolic else [side for side in every[1:-1] if not _is_only_name(side)]
    return (first, [*rest, last]) if not first or _is_name(first) else ("", [first, *rest, last])


def _is_name(side: str) -> bool:
    """Whether a side names a value that only the problem defines: it contains a variable or an unknown function."""
    rest = _TEXT.sub("", side)
    if rest != side and not any(character.isdigit() for character in rest):
        return True
    return bool(_NAME.fullmatch(side) or _UNKNOWN.search(rest) or _LETTER.search(_COMMAND.sub(" ", rest)))


def _is_only_name(side: str) -> bool:
    r"""Whether a side between two equals signs names a value and states none: CD in ``AB = CD = 7`` and the formula in
    ``A = \frac{1}{2}bh = 42``, but not ``43y`` in ``x = 43y = 42``."""
    if SIMPLE_NAME.fullmatch(side):
        return True
    return _is_name(side) and not _STATES.search(_COMMAND.sub(" ", _COEFFICIENT.sub(" ", _SCRIPT.sub("", side))))


def _split(text: str) -> Iterator[str]:
    r"""Splits at equals signs outside braces: the one in ``\sum_{n=1}`` does not split."""
    start, depth = 0, 0
    for mark in _EQUALS.finditer(text):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if mark[0] == "=" and depth == 0:
            yield text[start : mark.start()]
            start = mark.end()
    yield text[start:]
