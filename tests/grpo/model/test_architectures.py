"""`make architectures` in short: one type of each kind, right the way that is expected of it."""

from __future__ import annotations

import pytest
import torch

from benchmarks import architectures
from benchmarks.architectures import WRONG, Row, examine
from benchmarks.tiny_models import gradient_error

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
    "deepseek_v3:groups",
    "minimax_m3_vl_text",
    "qwen4_exp",
    "xlstm",
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


def test_a_model_that_cannot_be_loaded_is_a_wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("The size of tensor a (4) must match")

    monkeypatch.setattr(architectures, "load_policy", fails)
    row = examine("llama")
    assert (row.way, row.note) == ("wrong", "RuntimeError: The size of tensor a (4) must match")


def test_samples_that_generate_draws_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    row = examine("zamba2")
    assert (row.way, row.note.partition("; samples: ")[2][:30]) == ("packed", "transformers' own decoding dif")
    monkeypatch.setattr(architectures, "SAMPLES_DIFFER", {})
    assert examine("zamba2").way == "wrong"


def test_a_wrong_gradient_of_a_few_numbers_is_seen() -> None:
    """Sinks, with a hundredth of the largest gradient, are a tenth too large; a bias that is only rounding is not."""
    own = {"weight": torch.full((100, 100), 10.0), "sinks": torch.full((4,), 0.1), "bias": torch.full((4,), 2e-7)}
    assert gradient_error(own, own | {"bias": -own["bias"]}) == pytest.approx(4e-5)
    assert gradient_error(own, own | {"sinks": 1.1 * own["sinks"]}) == pytest.approx(0.1)
    missing = {name: own[name] for name in ("weight", "bias")}
    assert gradient_error(own, missing) == 1


def test_gradients_that_transformers_rounds_over_a_kink_are_held_against_float64() -> None:
    row = examine("ctrl")
    assert row.note == "gradients against float64; transformers' own float32: 3e-02"
    assert row.gradients is not None and row.gradients < 1e-4
