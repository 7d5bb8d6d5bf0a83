"""A judge's model behind an OpenAI-compatible endpoint: vLLM, SGLang, a hosted model."""

from __future__ import annotations

import os
from collections.abc import Sequence

from grpo.config.judge import JudgeSettings
from grpo.data.records import Message
from grpo.errors import InputError
from grpo.judging.chat_client import ChatEndpoint, request_body
from grpo.judging.chat_models import ChatModel, OnReply
from grpo.judging.counts import JudgeCounts
from grpo.judging.replies import Reply


class EndpointModel(ChatModel):
    """Asks an endpoint. Raises ConnectionError if it stays unreachable: if it returned "undecided" instead, a stage
    would succeed without any judgment."""

    waits = True

    def __init__(self, settings: JudgeSettings) -> None:
        key = None
        if settings.api_key_env is not None and not (key := os.environ.get(settings.api_key_env)):
            raise InputError(f"judge: environment variable {settings.api_key_env} is not set; api_key_env names it")
        self.settings, self.counts = settings, JudgeCounts()
        self._endpoint = ChatEndpoint(settings, key, self.counts)

    def reply_all(
        self, dialogues: Sequence[list[Message]], draws: Sequence[int], on_reply: OnReply | None = None
    ) -> list[Reply]:
        bodies = [request_body(self.settings, d, draw) for d, draw in zip(dialogues, draws, strict=True)]
        return self._endpoint.ask_all(bodies, on_reply)

    def close(self) -> None:
        self._endpoint.close()
