"""The judge of an RL job."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from grpo.config.judge import JudgeSettings
from grpo.data.records import Problem
from grpo.judging.background_verdicts import AnswerJudge
from grpo.rewards.judged import JUDGED, by_judge


def judge_of(
    settings: JudgeSettings | None, problems: Iterable[Problem], state: Path, processes: int
) -> AnswerJudge | None:
    """Creates the judge of these settings, which stores its replies in the job's state. Raises InputError, before
    anything is sampled, if a problem needs a judge and there is none."""
    if settings:
        return AnswerJudge(settings, state / "judge", processes)
    for problem in problems:
        if problem.verifier in JUDGED and problem.domain == "reasoning":
            by_judge(problem, "")
    return None
