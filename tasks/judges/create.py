"""Creates the judge of the settings: rules, a local Hugging Face model, or an OpenAI-compatible endpoint."""

from __future__ import annotations

from collections.abc import Callable

from grpo.config.judge import JudgeSettings
from tasks.judges.base import Judge
from tasks.judges.llm import ModelJudge
from tasks.judges.rule import RuleJudge

JUDGES: dict[str, Callable[[JudgeSettings], Judge]] = {
    "rule": RuleJudge,
    "local": ModelJudge,
    "openai": ModelJudge,
}


def make_judge(settings: JudgeSettings) -> Judge:
    """The judge of `settings.kind`."""
    return JUDGES[settings.kind](settings)
