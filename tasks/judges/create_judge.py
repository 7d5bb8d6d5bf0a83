"""Creates the judge that the settings describe: rules, references, a local Hugging Face model, or an OpenAI-compatible
endpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from grpo.config.judge import JudgeSettings
from grpo.judging.chat_models import OnProgress
from grpo.judging.create_voter import MODELS
from tasks.judges.base import Judge
from tasks.judges.model_judge import ModelJudge
from tasks.judges.reference import ReferenceJudge
from tasks.judges.rule import RuleJudge

JUDGES: dict[str, Callable[..., Judge]] = {
    "rule": RuleJudge,
    "reference": ReferenceJudge,
    "local": ModelJudge,
    "openai": ModelJudge,
}


def make_judge(settings: JudgeSettings, replies: Path | None = None, on_progress: OnProgress | None = None) -> Judge:
    """The judge of kind `settings.kind`. For a model, `replies` is the folder that stores its replies, so that a stage
    that continues asks nothing twice, and `on_progress` is told how many questions of a batch are answered."""
    if settings.kind in MODELS:
        return JUDGES[settings.kind](settings, replies, on_progress)
    return JUDGES[settings.kind](settings)
