"""What a client of a judge's endpoint makes once, and what for each batch of questions."""

from __future__ import annotations

import ssl
from typing import Any

import pytest

from grpo.config.judge import JudgeSettings
from grpo.judging.chat_client import ChatEndpoint
from grpo.judging.counts import JudgeCounts


def test_ten_questions_read_the_certificates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each verdict of a reward is a batch of one question. Nobody listens at port 9."""
    create, made = ssl.create_default_context, []

    def counted(*arguments: Any, **named: Any) -> ssl.SSLContext:
        made.append(create(*arguments, **named))
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", counted)
    where = {"kind": "openai", "base_url": "https://127.0.0.1:9/v1", "model": "m"}
    settings = JudgeSettings.model_validate({**where, "retries": 0, "backoff_s": 0.01, "away_max_s": 0.001})
    endpoint = ChatEndpoint(settings, None, JudgeCounts())
    for _ in range(10):
        with pytest.raises(ConnectionError, match="has answered nothing"):
            endpoint.ask_all([{}])
    assert len(made) == 1
