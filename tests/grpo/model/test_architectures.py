"""`make architectures` in short: one type of each kind, right the way that is expected of it."""

from __future__ import annotations

import pytest

from benchmarks.architectures import WRONG, Row, examine

PACKED = (
    "llama",
    "llama:dynamic",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "cohere2",
    "granite",
    "gpt_oss",
    "deepseek_v3",
    "llama4_text",
    "phi3",
    "opt",
    "qwen3_next",
    "mamba2",
    "lfm2",
    "jamba",
    "diffllama",
    "stablelm",
    "doge",
    "falcon",
    "bart",
    "axk2",
)
PLAIN = {
    "bloom": "first in h.0.self_attention)",
    "mpt": "in the forward pass of MptModel itself)",
    "hy_v4": "in layers.0.self_attn)",
}


def figures(row: Row) -> list[float]:
    return [value for value in (row.logprobs, row.gradients, row.saved) if value is not None]


@pytest.mark.parametrize("kind", PACKED)
def test_a_type_that_runs_packed(kind: str) -> None:
    row = examine(kind)
    assert row.way == "packed", row
    assert len(figures(row)) == 3
    assert max(figures(row)) <= WRONG


@pytest.mark.parametrize("kind", PLAIN)
def test_a_type_that_runs_plain(kind: str) -> None:
    row = examine(kind)
    assert row.way == "plain", row
    assert max(figures(row)) <= WRONG
    assert row.note.endswith(PLAIN[kind])


def test_a_type_whose_generate_contradicts_its_forward_pass_is_refused() -> None:
    row = examine("camembert")
    assert (row.way, row.logprobs) == ("refused", None)
    assert "its generate differs from its forward pass by" in row.note


def test_a_type_that_only_trains_in_training_mode_is_refused() -> None:
    row = examine("reformer")
    assert row.way == "refused"
    assert "AssertionError: If you want to train `ReformerModel`" in row.note
