"""The letter of a multiple-choice option in an answer."""

from __future__ import annotations

import re

from grpo.rewards.answers.claim import compatible, unwrapped

_BARE = re.compile(r"[(\[]?([A-Za-z])[)\].:]*+")
_AND_TEXT = re.compile(r"(?:\(([A-Z])\)|([A-Z])[).:]) (\S.*+)", re.DOTALL)
_NOUN = r"\b(?:answer|option|choice|antwort|lösung|réponse|respuesta|ответ)\b"
# For text with single spaces. Capital letters only: "the answer is a banana" names no option. Neither does "The answer
# is A banana": after A and I another word would make it a sentence.
_NAMED = re.compile(
    rf"(?:(?i:{_NOUN})|答案)(?: (?i:is|ist|est|es)\b)? ?[:：=是为]? ?"
    r"(?:\(([A-Z])\)|([B-HJ-Z])(?![\w'’])|([AI])(?= ?(?:[.,;:!)\]*]|$)| (?:because|since|as|weil|car|porque)\b))"
)
_REJECTED = re.compile(r"\bnot (?:\(?[A-Z]\)?)(?![\w'’])")
_NEGATION = re.compile(
    r"\b(?:no|not|never|neither|nor|none|cannot|except|wrong|incorrect|false|rather|instead|unlikely|but"
    r"|rul(?:e|es|ed|ing) out|eliminat\w*+|exclud\w*+|reject\w*+|avoid\w*+|discard\w*+|unlike"
    r"|doubt\w*+|unless|whether|suppos\w++"
    r"|if(?= (?:(?:the|my|an?) )?(?:right |correct |final )?(?:answer|option|choice))"
    r"|nicht|kein\w*+|falsch|pas|faux|ne|sin|нет|не)\b|n['’]t\b|不|没",
    re.IGNORECASE,
)
# After a letter: another one, as in "B, C", "B/C" and "B. Or C", or a question mark.
_CONTINUED = re.compile(
    r"[)\]]?+ ?(?:\?|(?:[,/;&+|]|\b(?i:and|or|und|oder|et|ou)\b|[.,;] ?(?i:and|or|maybe|perhaps|possibly)\b)[ ,]*+"
    r"(?i:(?:and|or|maybe|perhaps|possibly) )*+"
    r"(?:\([A-Z]\)|[B-HJ-Z](?![\w'’])|[AI](?= ?(?:[.,;:!?)/]|$| (?:and|or)\b))))"
)
_MARKED = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\{(\(?[A-Z]\)?[.:]? ?)\}")
_SPACING = re.compile(r"\\[ ,;:!]|~|\\q?quad(?![a-zA-Z])")
_PREDICATE = re.compile(
    r"(?:is|isn|are|was|wasn|would|wouldn|can|cannot|could|couldn|[Aa]nd|[Oo]r|[Mm]aybe|nor|not|does|doesn|has|looks"
    r"|seems)\b"
)
_OTHER_LETTER = re.compile(
    r"(?<!\w)(?:\([A-Z]\)|[A-Z]\))(?!\w)|(?<![\w.])[A-Z][.:](?= |$)|\A[A-Z](?:$|[,;/]| (?:or|and|is)\b)"
)


def letter(text: str) -> str | None:
    """B for "B", "(b)", "B.", "B) 42 metres", "the answer is B"; None for two letters and for a rejected letter: "I
    would not choose option B"."""
    text = _MARKED.sub(r"\1", unwrapped(compatible(text)).strip("$ "))
    text = " ".join(_SPACING.sub(" ", text).split())
    if match := _BARE.fullmatch(text):
        return match[1].upper()
    if match := _AND_TEXT.fullmatch(text):
        # The rest must be the option's own text, not a sentence about it or about another letter.
        alone = not (_PREDICATE.match(match[3]) or _OTHER_LETTER.search(match[3]))
        named = _named(match[3])
        return (match[1] or match[2]) if alone and named <= {match[1] or match[2]} else None
    text = text.replace("*", "").replace("$", "")
    claimed = _REJECTED.sub("\0", text)  # "the answer is B, not A"
    named = set() if _NEGATION.search(claimed) else _named(claimed)
    return (named.pop() or None) if len(named) == 1 else None


def _named(text: str) -> set[str]:
    """The letters that the text names as its answer; "" stands for one that is named with others or in doubt."""
    return {
        "" if _CONTINUED.match(text, match.end()) else match[1] or match[2] or match[3]
        for match in _NAMED.finditer(text)
    }
