"""Completions of a service as text: reasoning in think tags, however the service hands it over."""

from __future__ import annotations

import pytest

from grpo.generation.endpoint import whole


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "277"}, "277"),
        ({"content": None}, ""),
        ({"content": "277", "reasoning_content": "325 - 48"}, "<think>\n325 - 48\n</think>\n\n277"),
        ({"content": "277", "reasoning": "325 - 48\n"}, "<think>\n325 - 48\n</think>\n\n277"),
        ({"content": "277", "reasoning_content": None}, "277"),
        # The opening tag stands in the model's chat template.
        ({"content": "325 - 48\n</think>\n\n277"}, "<think>\n325 - 48\n</think>\n\n277"),
        ({"content": "<think>a</think>277"}, "<think>a</think>277"),
    ],
)
def test_whole(message, text):
    assert whole(message) == text
