"""A model runs packed where it computes the same as alone, and plain elsewhere (`grpo.model.probe`)."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
)

from benchmarks.tiny_models import build
from grpo.config.common import Hardware, Sampling
from grpo.errors import InputError
from grpo.generation.sampler import sample
from grpo.model.lm_head import Head, backbone_of
from grpo.model.loading import load_policy
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed import attention
from grpo.model.packed.attention import is_packed
from grpo.model.sharded.loading import load_to_copy

SHAPE = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
PROMPTS = [[5, 9, 7, 6, 11, 23, 31], [5, 9, 7, 6, 11, 23, 31], [12, 40]]
COMPLETIONS = [[7, 8, 9, 10, 11, 12, 13, 14], [30, 31, 32], [20, 21, 22, 23, 24, 25]]
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=10)


def save(config: PreTrainedConfig, folder: Path) -> str:
    """A model of random weights, large enough that its attention is far from uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return save(LlamaConfig(**SHAPE), tmp_path / "llama")


def load(folder: str, **hardware: Any) -> Any:
    return load_policy(folder, Hardware(device="cpu", **hardware))


def alone(folder: str) -> list[torch.Tensor]:
    """Log-probabilities of COMPLETIONS, each by a forward pass of its own with eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    rows = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        rows.append(logits.log_softmax(1).gather(1, torch.tensor(completion)[:, None]).squeeze(1).detach())
    return rows


def assert_right(model: Any, folder: str) -> None:
    with torch.no_grad():
        rows = completion_logprobs(model, PROMPTS, COMPLETIONS, 1.0)
    for row, expected in zip(rows, alone(folder), strict=True):
        torch.testing.assert_close(row[: len(expected)], expected, rtol=0, atol=2e-5)


def test_an_ordinary_model_runs_packed_without_a_word(llama: str, caplog: pytest.LogCaptureFixture) -> None:
    model = load(llama)
    assert is_packed(backbone_of(model))
    assert not caplog.records
    assert_right(model, llama)


@pytest.fixture
def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed layers multiply their scores by 0.9 of the model's scale."""
    right = attention.ScoreOptions

    def wrong(scale: float, *rest: Any) -> Any:
        return dataclasses.replace(right(scale, *rest), scale=0.9 * scale)

    monkeypatch.setattr(attention, "ScoreOptions", wrong)
    monkeypatch.setattr("grpo.model.fused.blocks.ScoreOptions", wrong)


@pytest.mark.usefixtures("wrong_scale")
@pytest.mark.parametrize("fused", [True, False])
def test_a_wrong_scale_in_a_packed_layer_is_noticed(llama: str, fused: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = load(llama, fused=fused)
    assert not is_packed(backbone_of(model))
    assert "runs plain, not packed (log-probabilities differ by" in caplog.text
    assert "first in layers.0" in caplog.text
    assert_right(model, llama)


@pytest.mark.usefixtures("wrong_scale")
def test_in_bfloat16_too(llama: str) -> None:
    assert not is_packed(backbone_of(load(llama, dtype="bfloat16")))


@pytest.mark.usefixtures("wrong_scale")
def test_packed_at_any_price_is_refused(llama: str) -> None:
    with pytest.raises(InputError, match="hardware.attention = 'packed' computes something else: log-probabilities"):
        load(llama, attention="packed")


def test_bfloat16_rounding_is_no_difference(llama: str) -> None:
    assert is_packed(backbone_of(load(llama, dtype="bfloat16")))


def test_plain_by_choice_draws_the_same_completions(llama: str) -> None:
    settings = Sampling(max_new_tokens=12, top_p=0.9)
    groups = []
    for way in ("packed", "plain"):
        model = load(llama, attention=way)
        groups.append(sample(model, [[5, 6, 7], [8, 9], [3, 4]], 3, settings, eos_id=2, seeds=[1, 2, 3]))
    for packed, plain in zip(*groups, strict=True):
        assert [c.tokens for c in plain] == [c.tokens for c in packed]
        assert [c.finished for c in plain] == [c.finished for c in packed]
        for one, other in zip(packed, plain, strict=True):
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)


KINDS = {
    "sliding window": MistralConfig(**SHAPE, sliding_window=4),
    "scaled logits": Cohere2Config(**{**SHAPE, "num_hidden_layers": 4}, sliding_window=4, logit_scale=0.0625),
    "capped logits and scores": Gemma2Config(
        **SHAPE, sliding_window=4, final_logit_softcapping=3.0, attn_logit_softcapping=2.0
    ),
    "sinks": GptOssConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1, sliding_window=4),
    "frequencies by length": Phi3Config(
        **SHAPE, rope_parameters={**LONGROPE, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_model_that_runs_packed(kind: str, tmp_path: Path) -> None:
    folder = save(KINDS[kind], tmp_path / "model")
    model = load(folder)
    assert is_packed(backbone_of(model))
    assert_right(model, folder)


def test_the_scale_of_logits_is_measured(llama: str, tmp_path: Path) -> None:
    assert Head(load(llama)).scale == 1
    cohere = load(save(KINDS["scaled logits"], tmp_path / "cohere"))
    assert Head(cohere).scale == pytest.approx(0.0625, rel=1e-5)
    assert Head(load(save(KINDS["capped logits and scores"], tmp_path / "gemma"))).scale is None


def test_capped_logits_of_bfloat16_states_are_float32(tmp_path: Path) -> None:
    folder = save(KINDS["capped logits and scores"], tmp_path / "gemma")
    model = load_policy(folder, Hardware(device="cpu", dtype="bfloat16"))
    head, random = Head(model), torch.Generator().manual_seed(0)
    weight = head.linear.weight.detach().float()
    states = torch.randn(5, weight.shape[1], generator=random).bfloat16()
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            logits = head(states)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.detach(), 3 * (states.float() @ weight.T / 3).tanh(), rtol=0, atol=1e-6)
    assert "forward" not in vars(head.linear)  # the model itself is unchanged


def test_what_transformers_cannot_run_is_refused_in_one_line(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no such operation\non this machine")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaModel.forward", fail)
    with pytest.raises(InputError, match="transformers cannot run this model here: ValueError: no such operation on"):
        load(llama)


def test_a_forward_pass_that_changes_weights_is_refused(tmp_path: Path) -> None:
    """RWKV divides the weights of every block after the first two by 2."""
    build("rwkv", tmp_path / "rescaled", rescale_every=2)
    for way in ("auto", "plain"):
        with pytest.raises(InputError, match=r"forward pass changes this model's weights \(rwkv.blocks.2.attention"):
            load(str(tmp_path / "rescaled"), attention=way)
    with pytest.raises(InputError, match="forward pass changes this model's weights"):  # not told by its first block
        load_to_copy(str(tmp_path / "rescaled"), Hardware(device="cpu"))
    build("rwkv", tmp_path / "not", rescale_every=6)  # more than there are blocks
    load(str(tmp_path / "not"))
