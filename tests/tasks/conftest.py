"""Short ways to a problem and to a sample of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grpo.data.records import Problem, Sample
from grpo.data.template import parse, render


@pytest.fixture
def problem() -> Callable[..., Problem]:
    def make(id: str = "p", text: str = "compute 1 + 2", answer: str = "3", **values: Any) -> Problem:
        defaults: dict[str, Any] = {"verifier": "number", "domain": "reasoning", "language": "en", "source": "test"}
        return Problem(id, [{"role": "user", "content": text}], answer, **{**defaults, **values})

    return make


@pytest.fixture
def sample() -> Callable[..., Sample]:
    def make(
        problem_id: str = "p", answer: str = "3", accuracy: float | None = 1.0, reasoning: str = "so", **values: Any
    ) -> Sample:
        completion = render(reasoning, answer)
        parts = parse(completion)
        rewards = {"format": 1.0, "language": 1.0} | ({} if accuracy is None else {"accuracy": accuracy})
        defaults: dict[str, Any] = {
            "problem_id": problem_id,
            "policy": "d",
            "completion": completion,
            "reasoning": parts.reasoning,
            "summary": parts.summary,
            "answer": parts.answer or "",
            "rewards": rewards,
            "tokens": 10,
            "finish_reason": "stop",
            "domain": "reasoning" if accuracy is not None else "general",
            "language": "en",
        }
        return Sample(**{**defaults, **values})

    return make
