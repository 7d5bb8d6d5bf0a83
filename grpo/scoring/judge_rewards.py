"""Asks a judge about a group of responses and turns its verdicts into rewards."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.judging.background_verdicts import AnswerJudge, Verdicts
from grpo.judging.questions import question_of
from grpo.judging.voting import Check, Claim
from grpo.processes.pool import Failure
from grpo.rewards.functions import Response
from grpo.rewards.judged import JUDGED, by_judge, reads_reference
from grpo.rewards.rubric import Criterion, read_rubric, rubric_score
from grpo.rewards.verifiers import COMPARING, exact

UNDECIDED = "judge_undecided"
"""Kind of failure: the judge did not give a verdict that was needed."""


@dataclass
class JudgedGroup:
    """The questions about the responses to one problem, and their pending verdicts."""

    problem: Problem
    verdicts: Verdicts
    claims: list[Claim | None]  # one per response: whether its answer is right
    checks: list[list[Check]]  # per response: one check per criterion
    criteria: list[Criterion]
    rewards: Collection[str]
    decides_unsure: bool
    counts: dict[str, int] = field(default_factory=dict)  # once finished, as `Scored.judged`

    @property
    def ready(self) -> bool:
        return self.verdicts.ready

    def finish(self, breakdowns: Sequence[dict[str, float]], given: Sequence[dict[str, float]]) -> list[list[Failure]]:
        """Waits for the verdicts and adds the resulting rewards to the breakdowns. Returns each response's failures.
        `given`: the scores of rules that did not fail, per response; gets those of verdicts that the judge gave.

        - accuracy, for the verifiers "judge" and "rubric"; also 1 if a rule that cannot read its reference gave 0 and
          the judge finds the answer correct
        - judge: the verdict on the answer, if the judge was asked, also if a rule has decided the answer
        - rubric: the score of the rubric
        """
        verdicts = self.verdicts.finish()
        self.counts = {"items": len(verdicts), "items/undecided": [*verdicts.values()].count(None)}
        failures: list[list[Failure]] = []
        of_each = zip(breakdowns, given, self.claims, self.checks, strict=True)
        for breakdown, given_scores, claim, checks in of_each:
            failed: list[Failure] = []
            if self.problem.verifier == "judge" and "accuracy" in self.rewards:
                breakdown["accuracy"] = float(claim is not None and bool(verdicts[claim]))
            if claim is not None:
                failed += self._reward_claim(breakdown, given_scores, verdicts[claim])
            elif "judge" in self.rewards and self.problem.domain == "reasoning":
                breakdown["judge"] = 0.0  # there is no answer
            if self.criteria:
                fulfilled = [verdicts[check] for check in checks]
                score = rubric_score(self.criteria, fulfilled) if checks else 0.0  # a blank summary scores 0
                name = "accuracy" if _verified_by_rubric(self.problem, self.rewards) else "rubric"
                breakdown[name] = score
                undecided = fulfilled.count(None)
                if checks and not undecided:
                    given_scores[name] = score
                failed += [Failure(UNDECIDED, f"{undecided} criteria undecided", False)] if undecided else []
            failures.append(failed)
        return failures

    def _reward_claim(
        self, breakdown: dict[str, float], given: dict[str, float], verdict: bool | None
    ) -> list[Failure]:
        needed = self.problem.verifier == "judge" or "judge" in self.rewards
        if verdict is None:
            if "judge" in self.rewards:
                breakdown["judge"] = 0.0
            return [Failure(UNDECIDED, "the judge did not decide on an answer", of_answer=not needed)]
        judged = self.problem.verifier in JUDGED
        sure = judged or reads_reference(self.problem)
        if not sure and self.decides_unsure and given.get("accuracy") == 0.0 and verdict:
            breakdown["accuracy"] = 1.0
        # An audit of a rule that failed compares nothing.
        if judged or (sure and "accuracy" in given) or "judge" in self.rewards:
            breakdown["judge"] = given["judge"] = float(verdict)
        return []


def ask(
    judge: AnswerJudge | None, problem: Problem, responses: Sequence[Response], rewards: Collection[str]
) -> JudgedGroup | None:
    """Starts judging what the rewards need; None if they need nothing. Raises InputError if a judge, reference or
    rubric that they need is missing."""
    criteria = _criteria(problem, rewards)
    needs_claim = problem.verifier == "judge" and "accuracy" in rewards and problem.domain == "reasoning"
    if judge is None:
        if needs_claim or (criteria and problem.verifier == "rubric"):
            by_judge(problem, "")
        return None
    if needs_claim and not problem.answer.strip():
        raise InputError(f"problem {problem.id} has verifier 'judge' and no reference answer; give one, or a rubric")
    claims = [_claim(judge, problem, response, rewards) for response in responses]
    checks = [_checks(problem, response, criteria) for response in responses]
    if not criteria and not any(claims) and not needs_claim and "judge" not in rewards:
        return None
    asked = [claim for claim in claims if claim] + [check for of_one in checks for check in of_one]
    return JudgedGroup(problem, judge.start(asked), claims, checks, criteria, rewards, judge.settings.decides_unsure)


def judged_rewards(problem: Problem, rewards: Collection[str]) -> set[str]:
    """Those of the rewards that a judge gives completions to the problem. Raises InputError if the rubric that it needs
    is missing or malformed."""
    names = set()
    if problem.domain == "reasoning":
        names |= {"accuracy"} if problem.verifier in JUDGED else set()
        names |= {"judge"} if problem.answer.strip() else set()
    if _criteria(problem, rewards) and not _verified_by_rubric(problem, rewards):
        names.add("rubric")
    return names & {*rewards}


def _criteria(problem: Problem, rewards: Collection[str]) -> list[Criterion]:
    verified = _verified_by_rubric(problem, rewards)
    if not verified and "rubric" not in rewards:
        return []
    try:
        criteria = read_rubric(problem.metadata)
    except InputError as error:
        raise InputError(f"problem {problem.id}: {error}") from None
    if verified and not criteria:
        raise InputError(f"problem {problem.id} has verifier 'rubric' and no rubric in its metadata; give one")
    return criteria


def _verified_by_rubric(problem: Problem, rewards: Collection[str]) -> bool:
    return problem.verifier == "rubric" and problem.domain == "reasoning" and "accuracy" in rewards


def _claim(judge: AnswerJudge, problem: Problem, response: Response, rewards: Collection[str]) -> Claim | None:
    """The claim that an answer is right, if the judge is to be asked; else None."""
    answer = response.parts.answer
    if problem.domain != "reasoning" or not answer or not answer.strip() or not problem.answer.strip():
        return None
    claim = Claim(question_of(problem.messages), problem.answer, answer)
    if "judge" in rewards or problem.verifier == "judge":
        return claim
    if problem.verifier not in COMPARING or "accuracy" not in rewards:
        return None
    if not reads_reference(problem):
        return claim if judge.settings.decides_unsure and not exact(problem, answer) else None
    return claim if _place(claim) < judge.settings.audit_share else None


def _place(claim: Claim) -> float:
    """A number in [0, 1) derived from the claim's content, so that a resumed job audits the same answers."""
    return int.from_bytes(hashlib.blake2b(repr(claim).encode("utf-8", "replace"), digest_size=6).digest()) / 2**48


def _checks(problem: Problem, response: Response, criteria: Sequence[Criterion]) -> list[Check]:
    summary = response.parts.summary
    question = question_of(problem.messages)
    return [Check(question, criterion.text, summary) for criterion in criteria] if summary.strip() else []
