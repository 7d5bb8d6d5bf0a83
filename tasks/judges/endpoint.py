"""A judge behind an OpenAI-compatible endpoint: vLLM, SGLang, a hosted model."""

from __future__ import annotations

import os
from collections.abc import Sequence

from grpo.data.records import Message
from grpo.errors import InputError
from tasks.judges.chat_client import ChatEndpoint, request_body
from tasks.judges.counts import JudgeCounts
from tasks.judges.llm import ModelJudge
from tasks.judges.prompts_and_replies import Reply
from tasks.judges.settings import JudgeSettings


class OpenAIJudge(ModelJudge):
    """Asks an endpoint. Raises ConnectionError when it stays away: with "undecided" a stage would succeed without any
    judgment."""

    def __init__(self, settings: JudgeSettings) -> None:
        key = None
        if settings.api_key_env is not None and not (key := os.environ.get(settings.api_key_env)):
            raise InputError(f"judge: environment variable {settings.api_key_env} is not set; api_key_env names it")
        self.settings, self.counts = settings, JudgeCounts()
        self._endpoint = ChatEndpoint(settings, key, self.counts)

    def reply_all(self, dialogues: Sequence[list[Message]], draws: Sequence[int]) -> list[Reply]:
        bodies = [request_body(self.settings, d, draw) for d, draw in zip(dialogues, draws, strict=True)]
        return self._endpoint.ask_all(bodies)
