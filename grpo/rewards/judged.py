"""Verifiers that ask a judge instead of a rule, and a check for references that a rule cannot read."""

from __future__ import annotations

import re

from grpo.data.records import Problem
from grpo.errors import InputError

JUDGED = ("judge", "rubric")
"""Verifiers that ask a judge: against the reference answer, and against the criteria of ``metadata["rubric"]``. The
scorer asks the judge (grpo/scoring/judge_rewards.py); these verifiers cannot be called as functions."""


def by_judge(problem: Problem, answer: str) -> float:
    """Raises InputError: there is no rule, and a call means that the job has no judge."""
    raise InputError(
        f"problem {problem.id} has verifier {problem.verifier!r}, but this job has no judge; set `judge` of the "
        "stage to one that is a model"
    )


def reads_reference(problem: Problem) -> bool:
    """Whether the problem's rule can read the reference: for "math" it must be an expression, not words."""
    return problem.verifier != "math" or not _words(problem.answer)


_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{3,}")
_FUNCTION = re.compile(r"(?:a(?:rc)?)?(?:sin|cos|tan)h?|cot|sec|csc|log|exp|sqrt|abs|min|max|gcd|lcm|mod|det|deg|lim")


def _words(reference: str) -> list[str]:
    """Words in a reference that are neither LaTeX commands nor functions."""
    return [word for word in _WORD.findall(_COMMAND.sub(" ", reference)) if not _FUNCTION.fullmatch(word)]
