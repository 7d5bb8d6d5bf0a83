r"""Percent signs in answers to questions that ask for percent.

To "What percent of 50 is 5?" with the gold answer 10, ``10\%`` is right and ``1000\%`` is not. For all other questions
a percent sign divides by a hundred: ``42\%`` is 0.42, never 42.
"""

from __future__ import annotations

import re

from grpo.rewards.answers.claim import claim

_PERCENT = r"per ?cent(?:ages?|s)?\b"
_NUMBER = (
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|half)\b"
)
# Up to two words before "percent", as in "the overall percent change". A number is none: "What is 20 percent of 210?"
# does not ask for percent.
_OF_WHAT = rf"(?:(?:the|her|his|its|their|your|our) )?(?:(?!{_NUMBER})[a-z]{{2,}} ){{0,2}}"
_ASKED = re.compile(
    rf"\b(?:what|which|how many)(?:['’]s| is| are| was| were| will be| would be)? {_OF_WHAT}{_PERCENT}"
    rf"|\b(?:find|calculate|determine|compute|estimate|give|state) {_OF_WHAT}{_PERCENT}"
    rf"|\b(?:as|in)(?: an?)? {_PERCENT},? (?:what|which|how)\b"
    rf"|\bnearest (?:(?:whole|integer|full|[0-9.]+|(?:tenth|hundredth)(?: of)?(?: an?| one)?) )?{_PERCENT}"
    r"|\bwie ?viele? prozent\b|\bwelche[rn]? prozentsatz\b|\bquel pourcentage\b|\bqué porcentaje\b|百分之几|百分之多少",
    re.IGNORECASE,
)
"""Matches a question for percent, not one with a number in percent."""
_UNIT = re.compile(rf" (?:as|in|to)(?: an?)? {_PERCENT}", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[?!\n]|\.(?![0-9])")
_ASKS = re.compile(
    r"\b(?:what|which|how|find|calculate|determine|compute|estimate|express|give|giving|write|written|state|answer"
    r"|report|convert)\b",
    re.IGNORECASE,
)
_SENTENCE = 200
"""Maximum number of characters between "What is" and "as a percent"."""
_WORD = r"(?:per ?cent(?:age points?)?|pct|prozent)"
_SIGN = re.compile(rf"(?:\\?%|\\(?:text|mathrm) ?\{{ ?(?:\\?%|{_WORD}) ?\}}|(?:\b|(?<=[0-9])){_WORD})$", re.IGNORECASE)
_THIN_SPACE = "\\,"


def readings(question: str, gold: str, answer: str) -> list[tuple[str, str]]:
    r"""Pairs (gold answer, answer); the answer is right if one pair is equal. Unchanged unless the question asks for
    percent. Then both are in percent, with or without a sign: 10 and ``10\%``. If one has a sign, they may also be
    equal as numbers, so that ``\frac{1}{10} = 10\%`` is right, and 0.5 if the gold answer is ``50\%``."""
    (bare, signed_gold), (plain, signed_answer) = _apart(gold), _apart(answer)
    as_numbers = (signed_gold or bare, signed_answer or plain)
    if not (signed_gold or signed_answer) or not _in_percent(" ".join(question.split())):
        return [as_numbers]
    return [(bare, plain), (signed_gold or f"{bare}\\%", as_numbers[1])]


def _in_percent(question: str) -> bool:
    if _ASKED.search(question):
        return True
    before = (question[max(0, unit.start() - _SENTENCE) : unit.start()] for unit in _UNIT.finditer(question))
    return any(_ASKS.search(_SENTENCE_END.split(text)[-1]) for text in before)


def _apart(text: str) -> tuple[str, str]:
    r"""The claim without the percent sign at its end, and with it as ``\%``; if it has none, the text and ""."""
    claimed = claim(text)
    sign = None if claimed is None else _SIGN.search(claimed)
    if claimed is None or sign is None:
        return text, ""
    bare = claimed[: sign.start()].rstrip(" ~").removesuffix(_THIN_SPACE).rstrip()
    return (bare, f"{bare}\\%") if bare else (text, "")
