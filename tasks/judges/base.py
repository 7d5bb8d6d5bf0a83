"""The interface of judges: what they are asked and what they return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from grpo.data.records import Problem
from grpo.judging.counts import JudgeCounts
from grpo.judging.voting import Claim

__all__ = ["PREFERENCE", "Claim", "Judge", "JudgeCounts", "Pair", "Response", "Verdict"]

Verdict = Literal["correct", "incorrect", "undecided"]
PREFERENCE = {"A>>B": 2.0, "A>B": 1.0, "A=B": 0.0, "B>A": -1.0, "B>>A": -2.0}
"""The paper's five verdicts as numbers. It publishes no scale, only that pairs with |mean difference| > 1 are kept."""


class Pair(NamedTuple):
    """Two responses to compare."""

    problem: Problem
    a: str
    b: str


class Response(NamedTuple):
    """One response to judge on its own."""

    problem: Problem
    text: str


class Judge(Protocol):
    """Judges batches of items. Verdicts are in the order of the items."""

    counts: JudgeCounts
    """Counts of all items since the judge was created."""

    fallible: bool
    """Whether its verdicts on answers need calibration. A model's verdicts do; a rule agrees with the rules anyway."""

    def correct_all(self, claims: Sequence[Claim]) -> list[Verdict]:
        """Whether each answer means the same as its reference."""

    def compare_all(self, pairs: Sequence[Pair]) -> list[float | None]:
        """For each pair, a preference from 2.0 (a much better) to -2.0 (b much better), 0.0 for a tie; None if
        undecided."""

    def can_compare(self, problem: Problem) -> bool:
        """Whether the judge has anything to base a comparison of responses to this problem on."""
        return True

    def safe_all(self, responses: Sequence[Response]) -> list[bool | None]:
        """Whether each response is harmless; None if undecided."""

    def good_all(self, responses: Sequence[Response]) -> list[bool | None]:
        """Whether each response is good enough to train on; None if undecided. If the problem has an answer, it serves
        as the reference."""

    def refused_all(self, responses: Sequence[Response]) -> list[bool | None]:
        """Whether each response refuses its prompt; None if undecided."""

    def correct(self, question: str, reference: str, answer: str) -> Verdict:
        return self.correct_all([Claim(question, reference, answer)])[0]

    def compare(self, problem: Problem, a: str, b: str) -> float | None:
        return self.compare_all([Pair(problem, a, b)])[0]

    def safe(self, problem: Problem, response: str) -> bool | None:
        return self.safe_all([Response(problem, response)])[0]

    def good(self, problem: Problem, response: str) -> bool | None:
        return self.good_all([Response(problem, response)])[0]
