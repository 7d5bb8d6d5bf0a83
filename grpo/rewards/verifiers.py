"""Rules that check an answer against its problem: one function per verifier, selected from `VERIFIERS` by name.

A verifier sees the extracted answer (the content of the answer tags or the box), never the whole completion.
An answer is untrusted model output. If it cannot be read in the required form, it is wrong and scores 0.0. Any other
error during scoring is not a verdict and is raised, for the caller to count. No answer is evaluated as a program,
except by "code", in a sandbox. "math" and some families of "reasoning_gym" build the answer in sympy, which can run for
a long time on input like 9^(9^9). Neither limits its own time, because the only cheap way, SIGALRM, works only in the
main thread. Therefore the caller scores in a process that it can kill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.rewards.answers.claim import compatible
from grpo.rewards.answers.golds import doubtful
from grpo.rewards.answers.letters import letter
from grpo.rewards.answers.mathematics import equal, usable
from grpo.rewards.answers.numbers import value
from grpo.rewards.answers.percent import readings
from grpo.rewards.answers.restated import restated
from grpo.rewards.judged import JUDGED, by_judge
from grpo.rewards.reasoning_gym import reasoning_gym


def verify(problem: Problem, answer: str | None) -> float:
    """The score of `answer` in [0, 1]; 1.0 is right. A missing or blank answer scores 0.0."""
    verifier = VERIFIERS.get(problem.verifier)
    if verifier is None:
        raise InputError(
            f"problem {problem.id}: unknown verifier {problem.verifier!r}; known are {', '.join(VERIFIERS)}"
        )
    if answer is None or not answer.strip():
        return 0.0
    return verifier(problem, answer)


def verify_gold(problem: Problem) -> float:
    """The score of a problem's own gold answer. For "math", equal text is not enough: 0.0 if no other answer could be
    judged by it."""
    if problem.verifier == "math" and doubtful(problem.answer) and not usable(problem.answer):
        return 0.0
    return verify(problem, problem.answer)


def may_take_long(problem: Problem) -> bool:
    """Whether `verify_gold` must run in a process that can be killed."""
    return problem.verifier == "code" or (problem.verifier == "math" and doubtful(problem.answer))


def exact(problem: Problem, answer: str) -> float:
    """Equal text, ignoring Unicode compatibility forms, case, runs of white space and periods at the end. A superscript
    is not a digit: 4² is not 42."""
    return float(_plain(answer) != "" and _plain(answer) == _plain(problem.answer))


def number(problem: Problem, answer: str) -> float:
    """Equal value, compared exactly as fractions: 1,000 = 1000, $5 = 5, 3.50 = 3.5 = 7/2, 50% = 0.5. Words may
    introduce it, as in "the result is 42"; see `grpo.rewards.answers.claim`. Questions that ask for percent are an
    exception, see `grpo.rewards.answers.percent`. 84/2 is not 42 if it stands in the question."""
    right = any(_same_value(*pair) for pair in readings(problem.text, problem.answer, answer))
    return float(right and not restated(problem.text, problem.answer, answer))


def mathematical(problem: Problem, answer: str) -> float:
    """One expression (LaTeX or plain), mathematically equal by math-verify; equal text is right even if it can parse
    neither. Questions that ask for percent: as in `number`. A calculation copied from the question is wrong: see
    `grpo.rewards.answers.restated`.

    Errors of math-verify that say nothing about the answer are raised. Its own time limits are off, because they use
    SIGALRM and so need the main thread. The caller limits time.
    """
    if exact(problem, answer):
        return 1.0
    right = any(equal(*pair) for pair in readings(problem.text, problem.answer, answer))
    return float(right and not restated(problem.text, problem.answer, answer))


def choice(problem: Problem, answer: str) -> float:
    """The letter of a multiple-choice option: B, (b), B., "B) 42", "the answer is B". Two letters, or a rejected letter
    as in "not option B", give no letter."""
    given = letter(answer)
    return float(given is not None and given == letter(problem.answer))


def code(problem: Problem, answer: str) -> float:
    """1.0 if the program in the answer passes all of ``metadata["tests"]``; see grpo/rewards/code.py.

    Raises `grpo.processes.pool.AnswerFailure` if the program breaks a limit.
    """
    from grpo.rewards.code import check, passes, read_grading

    tests = problem.metadata.get("tests", [])
    try:
        check(tests)
    except InputError as error:
        raise InputError(f"problem {problem.id}, metadata['tests']: {error}") from None
    return passes(answer, tests, grading=read_grading(problem.metadata))


def time_limit_s(problem: Problem) -> float:
    """Seconds that a pool must allow for checking an answer, if the problem has tests; else 0."""
    if problem.verifier != "code":
        return 0.0
    from grpo.rewards.code import MARGIN_S, START_S, TOTAL_S, read_grading

    tests = len(problem.metadata.get("tests") or [])
    return MARGIN_S + (read_grading(problem.metadata).total_s(tests) or TOTAL_S + START_S * tests)


def none(problem: Problem, answer: str) -> float:
    """General prompts have no rule: a reward model or a judge scores them, and calling this is an error."""
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
"""Verifiers whose time is linear in the answer's length: mostly microseconds, a fraction of a second for a megabyte."""


def agree(problem: Problem, answer: str, other: str) -> bool:
    """Whether two answers to a problem are the same by its rule, whether right or wrong.

    A rule that does not compare with a gold answer (a scorer, tests) cannot tell; then answers are compared by value,
    or else by text.
    """
    return COMPARING.get(problem.verifier, _value_or_text)(dataclasses.replace(problem, answer=other), answer) == 1.0


def _value_or_text(problem: Problem, answer: str) -> float:
    return float(_same_value(problem.answer, answer) or exact(problem, answer))


COMPARING: dict[str, Callable[[Problem, str], float]] = {
    "exact": exact,
    "number": number,
    "math": mathematical,
    "choice": choice,
}
"""Verifiers that only compare with the problem's reference answer."""


def _same_value(gold: str, answer: str) -> bool:
    given = value(answer)
    return given is not None and given == value(gold)


def _plain(text: str) -> str:
    return compatible(text).casefold().rstrip(". ")
