"""Creates the judge of the settings: rules, a local Hugging Face model, or an OpenAI-compatible endpoint."""

from __future__ import annotations

from collections.abc import Callable

from tasks.judges.base import Judge
from tasks.judges.endpoint import OpenAIJudge
from tasks.judges.local import LocalJudge
from tasks.judges.rule import RuleJudge
from tasks.judges.settings import JudgeSettings

JUDGES: dict[str, Callable[[JudgeSettings], Judge]] = {
    "rule": RuleJudge,
    "local": LocalJudge,
    "openai": OpenAIJudge,
}


def make_judge(settings: JudgeSettings) -> Judge:
    """The judge of `settings.kind`."""
    return JUDGES[settings.kind](settings)
