"""Creates the voter of a judge's settings."""

from __future__ import annotations

from collections.abc import Callable

from grpo.config.judge import JudgeSettings
from grpo.judging.endpoint import EndpointModel
from grpo.judging.local import LocalModel
from grpo.judging.models import ChatModel
from grpo.judging.voting import Voter

MODELS: dict[str, Callable[[JudgeSettings], ChatModel]] = {"local": LocalModel, "openai": EndpointModel}
"""Kinds of judges that are models."""


def make_voter(settings: JudgeSettings) -> Voter:
    """The voter of a judge that is a model: its kind is one of MODELS."""
    return Voter(settings, MODELS[settings.kind](settings))
