"""Creates the voter that a judge's settings describe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from grpo.config.judge import JudgeSettings
from grpo.judging.chat_models import ChatModel, OnProgress
from grpo.judging.endpoint import EndpointModel
from grpo.judging.local import LocalModel
from grpo.judging.reply_cache import RememberingModel
from grpo.judging.voting import Voter

MODELS: dict[str, Callable[[JudgeSettings], ChatModel]] = {"local": LocalModel, "openai": EndpointModel}
"""Kinds of judges that are models."""


def make_voter(
    settings: JudgeSettings, folder: Path | None = None, processes: int = 1, on_progress: OnProgress | None = None
) -> Voter:
    """Creates the voter of a judge whose kind is one of MODELS. `folder`: where replies are stored, so that no question
    is asked twice. `processes`: number of the job's processes, which share the budget equally."""
    model = MODELS[settings.kind](settings)
    if folder is not None or settings.budget_requests is not None or settings.budget_tokens is not None:
        model = RememberingModel(model, settings, folder, processes)
    return Voter(settings, model, on_progress)
