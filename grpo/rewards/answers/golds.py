r"""Gold answers of mathematics that need a closer look: text that may be broken, or a calculation that may not end.

Equal text is right, so ``\frac{1}{`` and ``9^{9^{9}}`` are right by themselves, although no other answer to them can be
judged. math-verify needs a tenth of a second for one; so those that look plain are told apart first, by patterns.
"""

from __future__ import annotations

import re

_LONGEST = 200
_EMPTY_GROUP = re.compile(r"(?<!\\)\{ *\}")
_UNFINISHED = re.compile(r"^[*/^_]|(?:[-+*/^_=\\]|\\(?:cdot|times|div|d?frac|sqrt))$")
_BY_ZERO = re.compile(r"(?:/|÷|\\div) ?\(?0+(?:\.0*+)?(?![.0-9])|\} ?\{ ?0+(?:\.0*+)?\}|frac ?[0-9]0(?![0-9])")
# A power of a power, an exponent of four digits (of two, after a bracket), factorials but those of small numbers,
# binomials likewise, sums, integrals and limits.
_LARGE = re.compile(
    r"\^ ?\{[^{}]*\^|\^ ?[^ {]\^|\^ ?\{? ?-?[0-9]{4}|[)\]}] ?\^ ?\{? ?[0-9]{2}|! ?!|[^0-9]!|[0-9]{4}!"
    r"|\\d?binom(?!\{\w{1,3}\}\{\w{1,3}\})|\\(?:sum|prod|i*int|oint|lim)(?![a-z])"
)
_PLAIN = re.compile(rf"[-$]?[^\W_][\w ,.%'-]{{,{_LONGEST}}}(?<!-)")
_SAYS = re.compile(r"[^\W_]|[^\x00-\x7f]")
_ESCAPED = re.compile(r"\\[^a-zA-Z]")
_WORD = re.compile(r"[^\W\d_]{2}")
_MARKUP = re.compile(r"[\\{}^_]")


def doubtful(gold: str) -> bool:
    """Whether a gold answer must be read by math-verify, which may take long, before it is known to be usable."""
    if _PLAIN.fullmatch(gold):
        return False
    return not well_formed(gold) or len(gold) > _LONGEST or bool(_LARGE.search(gold) or _BY_ZERO.search(gold))


def is_words(gold: str) -> bool:
    """Whether a gold answer is plain text, such as a name."""
    return bool(_WORD.search(gold)) and not _MARKUP.search(gold)


def well_formed(gold: str) -> bool:
    """Whether a gold answer says something, and closes what it opens."""
    text = gold.strip(" $.")
    if not _SAYS.search(text) or _EMPTY_GROUP.search(text) or _UNFINISHED.search(text):
        return False
    text = _ESCAPED.sub("", text)
    if text.count("(") + text.count("[") != text.count(")") + text.count("]"):
        return False
    depth = 0
    for piece in text.split("}")[:-1]:
        depth += piece.count("{") - 1
        if depth < 0:
            return False
    return text.count("{") == text.count("}")
