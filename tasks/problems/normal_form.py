"""The normal form of a problem: what two wordings of one problem have in common, and which side of the split it is on.

The split between training and evaluation goes by the hash of the normal form. So a sum that is asked in two languages
is on one side, and whoever writes text to train on, such as the miniature's corpus, knows the held-out side without
having the problems.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator

from grpo.rewards.arithmetic import expressions

HELD_OUT = "r1flow"
"""Salt of the split into training and evaluation."""
_OPERATION = re.compile(r"[\d)] ?[-+*/^\u00d7\u00f7\u00b7\u2212\u2013\\]")
_OPERANDS = re.compile(r"\d+(?:\.\d+)?")
_WORD = re.compile(r"[^\W\d_]+")
_WORDING = 12
"""Most words around a calculation that only ask for it; longer texts are word problems, and differ by their words."""
_LONGEST = 400
"""Characters of a prompt beyond which it is no wording of a calculation."""


def normalise(text: str) -> str:
    """The text by which prompts are compared: composed Unicode (x² stays unlike x2), no case, single spaces."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def normal_form(text: str) -> str:
    """The calculation that a prompt asks for, such as "4-1+7" of "compute 4 - 1 + 7" and of "was ist 4 − 1 + 7?"; the
    normalised text of any other prompt."""
    if len(text) <= _LONGEST and _OPERATION.search(text):
        found = [calculation for line in text.splitlines() for calculation in expressions(line)]
        if len(found) == 1 and len(_WORD.findall(text)) <= _WORDING:
            return found[0]
    return normalise(text)


def place(form: str, salt: str = HELD_OUT) -> float:
    """The place of a normal form in [0, 1), by its salted hash. It is held out below the held-out share."""
    digest = hashlib.sha256(f"{salt}\0{form}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48  # 48 bits are exact in a float, and stay below 1


def long_calculations(text: str) -> Iterator[str]:
    """Calculations with three or more numbers in a text, in their normal form. Shorter ones are facts such as 3 + 4
    that every text shares."""
    for line in text.splitlines():
        if _OPERATION.search(line):
            yield from (found for found in expressions(line) if len(_OPERANDS.findall(found)) > 2)
