"""The normal form of a problem: what different wordings of one problem have in common. It decides the side of the
split.

The hash of the normal form decides between training and evaluation. So a sum that is asked in two languages is on one
side, and a writer of training text, such as the miniature's corpus, can tell which problems are held out without having
them.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator

from grpo.rewards.arithmetic import expressions

HELD_OUT = "r1flow"
"""Salt for the split into training and evaluation."""
_OPERATION = re.compile(r"[\d)] ?[-+*/^\u00d7\u00f7\u00b7\u2212\u2013\\]")
_OPERANDS = re.compile(r"\d+(?:\.\d+)?")
_WORD = re.compile(r"[^\W\d_]+")
_WORDING = 12
"""Maximum number of words around a calculation that only ask for it. Longer texts are word problems, which differ by
their words."""
_LONGEST = 400
"""Maximum characters of a prompt that can be a wording of a calculation."""


def normalise(text: str) -> str:
    """The text by which prompts are compared: composed Unicode (x² stays different from x2), case-folded, with single
    spaces."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def normal_form(text: str) -> str:
    """The calculation that a prompt asks for, such as "4-1+7" for "compute 4 - 1 + 7" and for "was ist 4 − 1 + 7?". For
    any other prompt, its normalised text."""
    if len(text) <= _LONGEST and _OPERATION.search(text):
        found = [calculation for line in text.splitlines() for calculation in expressions(line)]
        if len(found) == 1 and len(_WORD.findall(text)) <= _WORDING:
            return found[0]
    return normalise(text)


def place(form: str, salt: str = HELD_OUT) -> float:
    """A number in [0, 1) from the salted hash of a normal form. The problem is held out if it is below the held-out
    share."""
    digest = hashlib.sha256(f"{salt}\0{form}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48  # 48 bits are exact in a float, and the result stays below 1


def long_calculations(text: str) -> Iterator[str]:
    """Calculations in a text with three or more numbers, in normal form. Shorter ones are facts such as 3 + 4, which
    all texts share."""
    for line in text.splitlines():
        if _OPERATION.search(line):
            yield from (found for found in expressions(line) if len(_OPERANDS.findall(found)) > 2)
