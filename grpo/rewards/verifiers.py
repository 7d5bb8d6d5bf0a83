"""Rules that check an answer against its problem: one function a verifier, chosen from `VERIFIERS` by name.

A verifier sees the extracted answer (what stood in the answer tags or the box), never the whole completion.
An answer is model output and untrusted. One that cannot be read in the form asked for is wrong and scores 0.0. Whatever
else goes wrong while it is scored is no verdict and is raised, for the caller to count. No answer is evaluated as a
program, except by "code", in a sandbox. "math" and some families of "reasoning_gym" build the answer in sympy, which
can run for a long time on something like 9^(9^9). Neither limits its own time, because the only cheap way, SIGALRM,
works in the main thread alone: the caller scores in a process that it can kill.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.rewards.expressions import numeral
from grpo.rewards.judged import JUDGED, by_judge
from grpo.rewards.no_evaluation import no_evaluation
from grpo.rewards.reasoning_gym import reasoning_gym


def verify(problem: Problem, answer: str | None) -> float:
    """The score of `answer` in [0, 1]; 1.0 is right. No answer, or a blank one, scores 0.0."""
    verifier = VERIFIERS.get(problem.verifier)
    if verifier is None:
        raise InputError(
            f"problem {problem.id}: unknown verifier {problem.verifier!r}; known are {', '.join(VERIFIERS)}"
        )
    if answer is None or not answer.strip():
        return 0.0
    return verifier(problem, answer)


def exact(problem: Problem, answer: str) -> float:
    """Equal text, after Unicode compatibility forms, case, runs of white space and full stops at the end."""
    return float(_plain(answer) != "" and _plain(answer) == _plain(problem.answer))


def number(problem: Problem, answer: str) -> float:
    """Equal value, compared exactly as fractions: 1,000 = 1000, $5 = 5, 3.50 = 3.5 = 7/2, 50% = 0.5."""
    value = _value(answer)
    return float(value is not None and value == _value(problem.answer))


def mathematical(problem: Problem, answer: str) -> float:
    """Equal as mathematics (LaTeX or plain), by math-verify; equal text is right even where it parses neither.

    math-verify says ValueError of what is no expression, or has no value, such as 1/0: wrong. Other errors are raised.
    Its own time limits are off: they need SIGALRM, hence the main thread. The caller limits time.
    """
    if exact(problem, answer):
        return 1.0
    parse, equal = _math_verify()
    with no_evaluation() as refusals:
        gold = parse(problem.answer)
        if refusals:
            raise refusals[0]  # math-verify would go on without what it could not read
        try:
            return float(equal(gold, parse(answer)))
        except ValueError:
            return 0.0


def choice(problem: Problem, answer: str) -> float:
    """The letter of a multiple-choice option: B, (b), B., "B) 42", "the answer is B"; two letters are none."""
    letter = _letter(answer)
    return float(letter is not None and letter == _letter(problem.answer))


def code(problem: Problem, answer: str) -> float:
    """1.0 if the program in the answer passes all of ``metadata["tests"]``; see grpo/rewards/code.py.

    Raises `grpo.processes.pool.AnswerFailure` if the program breaks a limit.
    """
    from grpo.rewards.code import check, passes

    tests = problem.metadata.get("tests", [])
    try:
        check(tests)
    except InputError as error:
        raise InputError(f"problem {problem.id}, metadata['tests']: {error}") from None
    return passes(answer, tests)


def none(problem: Problem, answer: str) -> float:
    """General prompts have no rule: a reward model or a judge scores them, and coming here is a mistake."""
    raise InputError(
        f"problem {problem.id} has no verifier ('none'): prompts of domain {problem.domain!r} are scored by a reward "
        "model or a judge"
    )


VERIFIERS: dict[str, Callable[[Problem, str], float]] = {
    "exact": exact,
    "number": number,
    "math": mathematical,
    "choice": choice,
    "reasoning_gym": reasoning_gym,
    "code": code,
    "none": none,
    **dict.fromkeys(JUDGED, by_judge),
}


QUICK = {"exact", "number", "choice", "none"}
"""Verifiers that take microseconds whatever the answer is."""


def agree(problem: Problem, answer: str, other: str) -> bool:
    """Whether two answers to a problem are the same by its rule, be they right or wrong.

    A rule that does not compare with a gold answer (a scorer, tests) cannot say: then by value, or else by text.
    """
    return COMPARING.get(problem.verifier, _value_or_text)(dataclasses.replace(problem, answer=other), answer) == 1.0


def _value_or_text(problem: Problem, answer: str) -> float:
    return number(problem, answer) or exact(problem, answer)


COMPARING: dict[str, Callable[[Problem, str], float]] = {
    "exact": exact,
    "number": number,
    "math": mathematical,
    "choice": choice,
}
"""Verifiers that compare with the problem's own answer and read nothing else."""


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(". ")


_WRAPPER = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9.]+)\}\{(-?[0-9.]+)\}")
_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
# Three digits of exponent are enough for any answer; more would let a short answer fill the memory.
_NUMBER = re.compile(rf"([+-]?)({_DECIMAL})(e[+-]?[0-9]{{1,3}})?(?:/([+-]?)({_DECIMAL}))?(%?)", re.IGNORECASE)
_NUMBER_MAX_CHARACTERS = 200


def _unwrap(text: str) -> str:
    text = text.strip().strip("*` \n")
    while match := _WRAPPER.fullmatch(text.strip("$ ")):
        text = match[1].strip()
    return text


def _value(text: str) -> Fraction | None:
    text = _unwrap(text).replace("\u2212", "-")
    text = _FRACTION.sub(r"\1/\2", text).replace("\\%", "%").replace("\\$", "$")
    text = re.sub(r"[$€£¥\s]", "", text)
    match = _NUMBER.fullmatch(text) if len(text) <= _NUMBER_MAX_CHARACTERS else None
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


_BARE_LETTER = re.compile(r"[(\[]?([A-Za-z])[)\].:]*")
_LETTER_AND_TEXT = re.compile(r"(?:\(([A-Z])\)|([A-Z])[).:])\s+\S.*", re.DOTALL)
_ANSWER_IS = re.compile(r"\b(?:answer|option|choice)(?:\s+is)?\s*:?\s*\(?([A-Z])\b(?!')", re.IGNORECASE)


def _letter(text: str) -> str | None:
    text = _unwrap(text).strip("$ ")
    if match := _BARE_LETTER.fullmatch(text):
        return match[1].upper()
    named = {m.upper() for m in _ANSWER_IS.findall(text)}
    if match := _LETTER_AND_TEXT.fullmatch(text):
        named.add(match[1] or match[2])
    return named.pop() if len(named) == 1 else None


def _with_commas(digits: str) -> Any:
    """1,000 is a thousand, and 0,5 a half, as math-verify has it."""
    if digits.startswith("0"):
        digits = digits.replace(",", ".")
    return numeral(re.sub("[, ]", "", digits).lstrip("0") or "0")


@functools.cache
def _math_verify() -> tuple[Callable[[str], Any], Callable[[Any, Any], bool]]:
    import math_verify
    from latex2sympy2_extended import latex2sympy2

    # It gives the digits to sympy.Number, which evaluates text.
    latex2sympy2._Latex2Sympy.parse_number = lambda _, digits: numeral(digits.replace(",", ""))
    latex2sympy2.convert_number = _with_commas

    # Its warning that time limits are off would appear once a process; the module docstring says who limits time.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    latex = math_verify.LatexExtractionConfig()

    def parse(text: str) -> Any:
        # Outside dollar signs math-verify looks for a number in prose, and would read 3 out of 3\pi. Its reader of
        # plain expressions evaluates them as Python (sympy's parse_expr); its reader of LaTeX has a grammar.
        marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
        text = text if marked else f"${text}$"
        return math_verify.parse(text, [latex], parsing_timeout=None, raise_on_error=True)

    return parse, functools.partial(math_verify.verify, timeout_seconds=None, raise_on_error=True)
