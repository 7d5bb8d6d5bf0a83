r"""Percent signs in answers to questions that ask for percent.

To "What percent of 50 is 5?" with the gold answer 10, ``10\%`` is right and ``1000\%`` is not. For all other questions
a percent sign divides by a hundred: ``42\%`` is 0.42, never 42.
"""

from __future__ import annotations

import re

from grpo.rewards.answers.claim import claim

_PERCENT = r"per ?cent(?:ages?|s)?\b"
# A question for percent, not one with a number in percent: "What is 20 percent of 210?" does not match.
_ASKED = re.compile(
    rf"\b(?:what|which|how many)(?:['’]s| is| was| are| will be| would be)?(?: the)? (?:total |average )?{_PERCENT}"
    rf"|\b(?:find|calculate|determine|compute|estimate|give|state) the {_PERCENT}"
    rf"|\b(?:express|give|giving|write|written|state|answer|report)[^.?!\n]{{0,60}} (?:as an?|in) {_PERCENT}"
    r"|\bwie ?viele? prozent\b|\bwelche[rn]? prozentsatz\b|\bquel pourcentage\b|\bqué porcentaje\b|百分之几|百分之多少",
    re.IGNORECASE,
)
_WORD = r"(?:per ?cent(?:age points?)?|pct|prozent)"
_SIGN = re.compile(rf"(?:\\?%|\\(?:text|mathrm) ?\{{ ?(?:\\?%|{_WORD}) ?\}}|(?:\b|(?<=[0-9])){_WORD})$", re.IGNORECASE)
_THIN_SPACE = "\\,"


def readings(question: str, gold: str, answer: str) -> list[tuple[str, str]]:
    r"""Pairs (gold answer, answer); the answer is right if one pair is equal. Unchanged unless the question asks for
    percent. Then both are in percent, with or without a sign: 10 and ``10\%``. If one has a sign, they may also be
    equal as numbers, so that ``\frac{1}{10} = 10\%`` is right, and 0.5 if the gold answer is ``50\%``."""
    (bare, signed_gold), (plain, signed_answer) = _apart(gold), _apart(answer)
    as_numbers = (signed_gold or bare, signed_answer or plain)
    if not (signed_gold or signed_answer) or not _ASKED.search(" ".join(question.split())):
        return [as_numbers]
    return [(bare, plain), (signed_gold or f"{bare}\\%", as_numbers[1])]


def _apart(text: str) -> tuple[str, str]:
    r"""The claim without the percent sign at its end, and with it as ``\%``; if it has none, the text and ""."""
    claimed = claim(text)
    sign = None if claimed is None else _SIGN.search(claimed)
    if claimed is None or sign is None:
        return text, ""
    bare = claimed[: sign.start()].rstrip(" ~").removesuffix(_THIN_SPACE).rstrip()
    return (bare, f"{bare}\\%") if bare else (text, "")
