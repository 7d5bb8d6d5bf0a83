"""The judge of a sampling job, if its problems need one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from grpo.config.judge import JudgeSettings
from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.rewards.judged import JUDGED
from tasks.judges.base import Judge


def judge_of_samples(settings: JudgeSettings, *files: Path) -> JudgeSettings | None:
    """The judge that scores samples of the problems in the parquet files, in addition to the rules; None if not needed.

    Raises InputError if problems need a judge to verify them and the settings do not name one that is a model.
    """
    verifiers = (pq.read_table(file, columns=["verifier"])["verifier"].to_pylist() for file in files)
    judged = [name for of_file in verifiers for name in of_file if name in JUDGED]
    if not settings.is_model:
        if judged:
            raise InputError(
                f"{len(judged):,} problems have verifier {judged[0]!r}, and judge.kind is {settings.kind!r}; set "
                "judge to a model (kind 'openai' or 'local')"
            )
        return None
    return settings if judged or settings.decides_unsure or settings.audit_share else None


def judged_answers(result: Mapping[str, Any]) -> dict[str, float]:
    """What the judge of a sampling job did, from the job's result, as stage metrics: verdicts requested, verdicts not
    reached, and replies already known. Empty without a judge."""
    counts = result.get("judge") or {}
    names = {"items": "answers_judged", "items/undecided": "answers_undecided", "remembered": "judge_replies_known"}
    return {shown: counts.get(name, 0) for name, shown in names.items()} if counts else {}


def check_comparable(judge: Judge, problems: Sequence[Problem]) -> None:
    """Raises InputError if the judge has nothing to base comparisons on for some of these prompts: it would call every
    pair a tie."""
    blind = [problem for problem in problems if not judge.can_compare(problem)]
    if blind:
        raise InputError(
            f"the judge has nothing to compare responses by for {len(blind):,} of {len(problems):,} general prompts, "
            f"the first: {blind[0].text[:60]!r}; set judge to a model, or keep their metadata (rule: mentions, "
            "harmful; reference: reference)"
        )
