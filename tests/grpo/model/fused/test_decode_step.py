"""Decoding token by token says what the model says of the whole sequences, whoever computes it."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo.model.cpu.prepacked_linear import MAX_ROWS, MIN_STEPS, PrepackedLinear, is_worth_prepacking
from grpo.model.decoder import Decoder
from grpo.model.fused import decode_step
from grpo.model.fused.blocks import fuse_blocks
from grpo.model.fused.decode_step import MAX_CONCATENATED, can_decode
from grpo.model.fused.layers import fuse
from grpo.model.lm_head import backbone_of
from grpo.model.packed.attention import NAME
from tests.support import small_models

SHAPE = small_models.SHAPE | dict(head_dim=8)
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama with biases": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    # Its angles depend on the longest sequence too, so it is left to transformers.
    "llama with dynamic angles": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=DYNAMIC)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SHAPE)),
}
KNOWN = set(MODELS) - {"gemma", "llama with dynamic angles"}
GROUP = 4
PROMPTS = [[5, 6, 7], [8]]
TOKENS = [[9, 10, 11], [3, 4, 5], [20, 21, 22], [7, 7, 7], [30, 1, 2], [3, 4, 5], [12, 13, 14], [2, 2, 3]]


def made(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    for part, weight in model.named_parameters():
        if "norm" in part or part.endswith("bias"):  # else ones and zeros: what is left out would not show
            nn.init.uniform_(weight, 0.2, 1.5)
    model.set_attn_implementation(NAME)
    fuse(model)
    fuse_blocks(model)
    return model.eval()


def plain_logits(model, sequences):
    """Of the last token of each, by transformers alone."""
    other = type(model)(copy.deepcopy(model.config))
    other.load_state_dict(model.state_dict())
    other.set_attn_implementation("eager")
    return torch.stack([other.eval()(torch.tensor([sequence])).logits[0, -1] for sequence in sequences])


@pytest.mark.parametrize(("packed_rows", "joined"), [(0, MAX_CONCATENATED), (0, 0), (8, MAX_CONCATENATED), (8, 0)])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_next_logits_are_those_of_the_whole_sequences(name, packed_rows, joined, monkeypatch):
    monkeypatch.setattr(decode_step, "MAX_CONCATENATED", joined)
    if packed_rows and not torch.backends.mkl.is_available():
        pytest.skip("torch has no MKL here")
    model = made(name)
    assert can_decode(backbone_of(model), model.get_output_embeddings()) == (name in KNOWN)
    decoder = Decoder(model, packed_rows)
    after_prompts = decoder.add_groups(PROMPTS, GROUP)
    torch.testing.assert_close(after_prompts, plain_logits(model, PROMPTS), atol=1e-4, rtol=1e-4)
    rows = [[*PROMPTS[number // GROUP], *said] for number, said in enumerate(TOKENS)]
    for count in (1, 2):
        logits = decoder.step(torch.tensor([said[count - 1] for said in TOKENS]))
        begun = [row[: len(row) - 3 + count] for row in rows]
        torch.testing.assert_close(logits, plain_logits(model, begun), atol=1e-4, rtol=1e-4)
    # Packed weights take five of eight rows, and one as they are.
    for leaving in ([1, 4, 7], [0, 2, 3, 4]):
        left = decoder.remove(leaving)
        rows = [rows[place] for place in left]
        logits = decoder.step(torch.tensor([row[-1] for row in rows]))
        torch.testing.assert_close(logits, plain_logits(model, rows), atol=1e-4, rtol=1e-4)
        rows = [[*row, 9] for row in rows]


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has no MKL here")
@pytest.mark.parametrize(("packed_rows", "served"), [(8, True), (15, True), (16, False), (7, False)])
@torch.no_grad()
def test_packed_weights_serve_down_to_more_than_half_as_many_rows(packed_rows, served, monkeypatch):
    asked = []
    product = PrepackedLinear.product
    monkeypatch.setattr(PrepackedLinear, "product", lambda self, x: asked.append(len(x)) or product(self, x))
    decoder = Decoder(made("llama"), packed_rows)
    decoder.add_groups(PROMPTS, GROUP)
    decoder.step(torch.tensor([said[0] for said in TOKENS]))  # 8 rows
    assert asked == [packed_rows] * (4 * 2 + 1 if served else 0)  # four products in each of two blocks, and the head


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has no MKL here")
def test_packing_pays_for_some_rows_and_many_steps():
    assert is_worth_prepacking(32, MIN_STEPS)
    assert not is_worth_prepacking(32, MIN_STEPS - 1)
    assert not is_worth_prepacking(MAX_ROWS + 1, MIN_STEPS)
    assert not is_worth_prepacking(1, MIN_STEPS)


def test_other_types_and_adapters_are_left_to_transformers():
    def can(model):
        return can_decode(backbone_of(model), model.get_output_embeddings())

    assert can(made("qwen3"))
    assert not can(made("qwen3").to(torch.bfloat16))
    assert not can(get_peft_model(made("qwen3"), LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM")))
