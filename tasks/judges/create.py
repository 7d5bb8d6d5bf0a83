"""Judges: who says whether an answer is right, which of two responses is better, whether one is safe, or good.

One interface (judge_interface.py), three implementations: rules (no model at all), a local Hugging Face model, and an
OpenAI-compatible endpoint. A model's reply is untrusted: what is not exactly the JSON asked for is "undecided" (None
where the verdict is no word), never "correct".
"""

from __future__ import annotations

from collections.abc import Callable

from tasks.judges.base import PREFERENCE, Claim, Judge, Pair, Response, Verdict
from tasks.judges.counts import JudgeCounts
from tasks.judges.endpoint import OpenAIJudge
from tasks.judges.local import LocalJudge
from tasks.judges.prompts_and_replies import EVALUATION_DIGESTS, PROMPT_DIGESTS
from tasks.judges.rule import RuleJudge
from tasks.judges.settings import JudgeSettings

__all__ = [
    "EVALUATION_DIGESTS",
    "JUDGES",
    "PREFERENCE",
    "PROMPT_DIGESTS",
    "Claim",
    "Judge",
    "JudgeCounts",
    "JudgeSettings",
    "LocalJudge",
    "OpenAIJudge",
    "Pair",
    "Response",
    "RuleJudge",
    "Verdict",
    "make_judge",
]

JUDGES: dict[str, Callable[[JudgeSettings], Judge]] = {
    "rule": RuleJudge,
    "local": LocalJudge,
    "openai": OpenAIJudge,
}


def make_judge(settings: JudgeSettings) -> Judge:
    """The judge of `settings.kind`."""
    return JUDGES[settings.kind](settings)
