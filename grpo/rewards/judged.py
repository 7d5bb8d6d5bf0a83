"""Verifiers that are no rules: a judge checks the answer. And where a rule should not be sure of itself."""

from __future__ import annotations

import re

from grpo.data.records import Problem
from grpo.errors import InputError

JUDGED = ("judge", "rubric")
"""Verifiers that ask a judge: against the reference answer, and against the criteria of ``metadata["rubric"]``. A
scorer with a judge asks it (grpo/scoring/judge_rewards.py); they cannot be called."""


def by_judge(problem: Problem, answer: str) -> float:
    """There is no rule, and coming here is a mistake: this job has no judge."""
    raise InputError(
        f"problem {problem.id} has verifier {problem.verifier!r}, but this job has no judge; set `judge` of the "
        "stage to one that is a model"
    )


def reads_reference(problem: Problem) -> bool:
    """Whether the problem's rule can read the reference as what it compares: "math" an expression, not words."""
    return problem.verifier != "math" or not _words(problem.answer)


_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{3,}")
_FUNCTION = re.compile(r"(?:a(?:rc)?)?(?:sin|cos|tan)h?|cot|sec|csc|log|exp|sqrt|abs|min|max|gcd|lcm|mod|det|deg|lim")


def _words(reference: str) -> list[str]:
    """Words in a reference that are no commands of LaTeX and no functions."""
    return [word for word in _WORD.findall(_COMMAND.sub(" ", reference)) if not _FUNCTION.fullmatch(word)]
