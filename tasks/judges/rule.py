"""The judge that is no model."""

from __future__ import annotations

from collections.abc import Sequence

from grpo.data.records import Problem
from grpo.rewards.verifiers import verify
from tasks.judges import rubric
from tasks.judges.base import PREFERENCE, Claim, Judge, Pair, Response, Verdict
from tasks.judges.counts import JudgeCounts
from tasks.judges.settings import JudgeSettings


class RuleJudge(Judge):
    """A verifier for answers with a reference, a rubric for the rest. It is certain: a preference is 2, 0 or -2."""

    fallible = False

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings, self.counts = settings, JudgeCounts()

    def correct_all(self, claims: Sequence[Claim]) -> list[Verdict]:
        self.counts.add("items", len(claims))
        return [self._correct(claim) for claim in claims]

    def compare_all(self, pairs: Sequence[Pair]) -> list[float | None]:
        self.counts.add("items", len(pairs))
        return [self._compare(pair) for pair in pairs]

    def safe_all(self, responses: Sequence[Response]) -> list[bool | None]:
        self.counts.add("items", len(responses))
        return [rubric.safe(problem, text) for problem, text in responses]

    def good_all(self, responses: Sequence[Response]) -> list[bool | None]:
        self.counts.add("items", len(responses))
        return [rubric.good(problem, text, self.settings.quality_min) for problem, text in responses]

    def refused_all(self, responses: Sequence[Response]) -> list[bool | None]:
        self.counts.add("items", len(responses))
        return [rubric.refused(problem, text) for problem, text in responses]

    def _correct(self, claim: Claim) -> Verdict:
        messages = [{"role": "user", "content": claim.question}]
        problem = Problem("", messages, claim.reference, self.settings.verifier, "reasoning", "", "judge")
        return "correct" if verify(problem, claim.answer) == 1.0 else "incorrect"

    def _compare(self, pair: Pair) -> float:
        a, b = rubric.quality(pair.problem, pair.a), rubric.quality(pair.problem, pair.b)
        return PREFERENCE["A=B"] if a == b else PREFERENCE["A>>B" if a > b else "B>>A"]
