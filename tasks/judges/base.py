"""What a judge is asked, and what it says: the interface that every judge implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from grpo.data.records import Problem
from tasks.judges.counts import JudgeCounts

Verdict = Literal["correct", "incorrect", "undecided"]
PREFERENCE = {"A>>B": 2.0, "A>B": 1.0, "A=B": 0.0, "B>A": -1.0, "B>>A": -2.0}
"""The paper's five verdicts as numbers. It publishes no scale, only that |mean difference| > 1 is kept."""


class Claim(NamedTuple):
    """An answer to be checked against a reference."""

    question: str
    reference: str
    answer: str


class Pair(NamedTuple):
    """Two responses to be compared."""

    problem: Problem
    a: str
    b: str


class Response(NamedTuple):
    """One response to be judged by itself."""

    problem: Problem
    text: str


class Judge(Protocol):
    """Implementations judge batches; the verdicts come in the order of the items."""

    counts: JudgeCounts
    """Of everything that was asked since the judge was made."""

    fallible: bool
    """Whether its verdicts on answers need calibration: a model's do, a rule's agree with the rules anyway."""

    def correct_all(self, claims: Sequence[Claim]) -> list[Verdict]:
        """Whether each answer means the same as its reference."""

    def compare_all(self, pairs: Sequence[Pair]) -> list[float | None]:
        """From 2.0 (a much better) by 0.0 (a tie) to -2.0 (b much better); None where undecided."""

    def safe_all(self, responses: Sequence[Response]) -> list[bool | None]:
        """Whether each response does no harm; None where undecided."""

    def good_all(self, responses: Sequence[Response]) -> list[bool | None]:
        """Whether each response is good enough to learn from; None where undecided. A problem's answer, where there
        is one, is a reference to go by."""

    def refused_all(self, responses: Sequence[Response]) -> list[bool | None]:
        """Whether each response declines to do what its prompt asks; None where undecided."""

    def correct(self, question: str, reference: str, answer: str) -> Verdict:
        return self.correct_all([Claim(question, reference, answer)])[0]

    def compare(self, problem: Problem, a: str, b: str) -> float | None:
        return self.compare_all([Pair(problem, a, b)])[0]

    def safe(self, problem: Problem, response: str) -> bool | None:
        return self.safe_all([Response(problem, response)])[0]

    def good(self, problem: Problem, response: str) -> bool | None:
        return self.good_all([Response(problem, response)])[0]
