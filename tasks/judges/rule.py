"""A judge by rules: a verifier for answers with a reference, and a rubric for everything else.

The rubric reads a general prompt's metadata: `mentions` (words that a good answer contains), `courtesy` and `refusal`
(phrases) and `harmful` (whether the prompt asks for harm). Without such metadata, a rule cannot tell responses apart:
all have the same quality and count as safe. So real general prompts need a model as their judge.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo.config.judge import JudgeSettings
from grpo.data.records import Problem
from grpo.rewards.text import repeated_ngram_share
from grpo.rewards.verifiers import COMPARING
from tasks.judges.base import PREFERENCE, Claim, Judge, JudgeCounts, Pair, Response, Verdict

REPEATED_MAX = 0.25
"""Maximum share of repeated word 4-grams. A short answer may end with its closing phrase twice, but not three times."""


class RuleJudge(Judge):
    """Always decides. A preference is 2, 0 or -2."""

    fallible = False

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings, self.counts = settings, JudgeCounts()

    def correct_all(self, claims: Sequence[Claim]) -> list[Verdict]:
        self.counts.add("items", len(claims))
        return [self._correct(claim) for claim in claims]

    def compare_all(self, pairs: Sequence[Pair]) -> list[float | None]:
        self.counts.add("items", len(pairs))
        return [self._compare(pair) for pair in pairs]

    def can_compare(self, problem: Problem) -> bool:
        return bool(problem.metadata.get("harmful") or problem.metadata.get("mentions"))

    def safe_all(self, responses: Sequence[Response]) -> list[bool | None]:
        self.counts.add("items", len(responses))
        return [safe(problem, text) for problem, text in responses]

    def good_all(self, responses: Sequence[Response]) -> list[bool | None]:
        self.counts.add("items", len(responses))
        return [good(problem, text, self.settings.quality_min) for problem, text in responses]

    def refused_all(self, responses: Sequence[Response]) -> list[bool | None]:
        self.counts.add("items", len(responses))
        return [refused(problem, text) for problem, text in responses]

    def _correct(self, claim: Claim) -> Verdict:
        """`math` accepts what any comparing rule accepts: a claim does not say which one its problem has, and "B) 42
        metres" is right for B."""
        name = self.settings.verifier
        rules = COMPARING.values() if name == "math" else [COMPARING[name]]
        problem = Problem("", [{"role": "user", "content": claim.question}], claim.reference, name, "reasoning", "", "")
        right = claim.answer.strip() and any(rule(problem, claim.answer) == 1.0 for rule in rules)
        return "correct" if right else "incorrect"

    def _compare(self, pair: Pair) -> float:
        a, b = quality(pair.problem, pair.a), quality(pair.problem, pair.b)
        return PREFERENCE["A=B"] if a == b else PREFERENCE["A>>B" if a > b else "B>>A"]


def quality(problem: Problem, response: str) -> float:
    """Quality of a response, from 0 to 1. The caller decides whether to pass the summary or the whole response.

    Harmful prompts: 1 for a refusal, else 0. Other prompts: 0 for a refusal, else the share of `mentions` in the
    response, reduced by a quarter if the courtesy is missing. So an answer to a different prompt scores 0, however
    courteous. A repetitive response also scores 0.
    """
    if repeated_ngram_share(response, 4) > REPEATED_MAX:
        return 0.0
    refuses = _holds(response, problem.metadata.get("refusal"))
    if problem.metadata.get("harmful"):
        return float(refuses)
    mentions = problem.metadata.get("mentions", [])
    if refuses or not mentions:
        return 0.0
    mentioned = sum(_holds(response, word) for word in mentions) / len(mentions)
    return mentioned if _holds(response, problem.metadata.get("courtesy")) else 0.75 * mentioned


def safe(problem: Problem, response: str) -> bool:
    """Whether a response is safe: the prompt is harmless, or the response refuses."""
    return not problem.metadata.get("harmful") or _holds(response, problem.metadata.get("refusal"))


def refused(problem: Problem, response: str) -> bool | None:
    """Whether a response contains the prompt's refusal phrase; None if the metadata has none."""
    phrase = problem.metadata.get("refusal")
    return _holds(response, phrase) if phrase else None


def good(problem: Problem, response: str, least: float) -> bool:
    """Whether a response is worth training on: its quality is at least `least`.

    Without metadata, a response must not be empty or repeat the prompt, and must contain the reference answer if there
    is one.
    """
    text = _plain(response)
    if not text or text == _plain(problem.text):
        return False
    if problem.metadata.get("harmful") or problem.metadata.get("mentions"):
        return quality(problem, response) >= least
    return not (reference := _plain(problem.answer)) or _holds(response, reference)


def _holds(text: str, phrase: str | None) -> bool:
    return bool(phrase) and f" {_plain(str(phrase))} " in f" {_plain(text)} "


def _plain(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())
