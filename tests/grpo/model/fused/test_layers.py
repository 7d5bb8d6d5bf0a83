"""Fused modules say what transformers' say, in value and in gradient, and keep less for the gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from grpo.model.fused.blocks import fuse_blocks
from grpo.model.fused.layers import fuse
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed.attention import NAME
from tests.support.small_models import SHAPE

PROMPTS, COMPLETIONS = [[5, 6, 7], [5, 6, 7], [8]], [[3, 4, 0], [9] * 5, [0, 2]]


def taken_over(module):
    return {type(part).__name__ for part in module.modules() if "forward" in vars(part)}


def llama(config=None):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config or LlamaConfig(**SHAPE, tie_word_embeddings=True))
    model.set_attn_implementation(NAME)
    for norm in model.modules():
        if isinstance(norm, LlamaRMSNorm):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
    return model


def pair():
    """A model as it is, and the same fused."""
    model = llama()
    other = copy.deepcopy(model)
    fuse(other)
    fuse_blocks(other)
    return model, other


def gradients(model, times=1):
    """After so many micro-batches that are the same."""
    for _ in range(times):
        weights = torch.linspace(-1, 1, 15).view(3, 5)
        (completion_logprobs(model, PROMPTS, COMPLETIONS, 1.0) * weights).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        # Sums of up to 256 products of either sign, so the error scales with the largest element, not with each.
        bound = 256 * torch.finfo(torch.float32).eps * float(expected[name].abs().max())
        torch.testing.assert_close(found[name], expected[name], atol=bound, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("times", [1, 3])
def test_gradients_add_up_over_micro_batches(times):
    # From the second on, products are added to what is there; the tied embedding gets its share from both ends.
    model, fused = pair()
    assert_same_gradients(gradients(fused, times), gradients(model, times))


def test_the_row_of_the_padding_token_learns_as_in_transformers():
    # Token 0 is said and is the padding token: the embedding gives it no gradient, the head does.
    model, fused = (part.model.embed_tokens for part in pair())
    for embedding in (model, fused):
        for _ in range(2):
            embedding(torch.tensor([[0, 3, 3]])).sum().backward()
    assert fused.weight.grad[0].tolist() == [0.0] * 16
    assert fused.weight.grad[3].tolist() == model.weight.grad[3].tolist() == [4.0] * 16


@pytest.mark.parametrize("targets", [["gate_proj"], ["q_proj", "down_proj"], ["o_proj", "k_proj", "up_proj"]])
def test_adapters_work(targets):
    model, fused = pair()
    settings = LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = []
    for part in (model, fused):
        torch.manual_seed(1)
        adapted.append(get_peft_model(part, settings))
    expected, found = (gradients(part, 2) for part in adapted)
    assert len(expected) == 2 * 2 * len(targets)
    assert_same_gradients(found, expected)


def test_checkpointed_activations_have_the_same_gradients():
    model, fused = pair()
    fused.train()
    fused.gradient_checkpointing_enable()
    assert_same_gradients(gradients(fused, 2), gradients(model, 2))


def kept_numbers(run):
    """Numbers that autograd keeps, weights apart, each once."""
    kept = {}

    def pack(tensor):
        whole = tensor if tensor._base is None else tensor._base
        if not isinstance(whole, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    assert output.requires_grad
    return sum(kept.values())


def test_a_norm_keeps_its_input_and_a_number_a_token():
    norm = LlamaRMSNorm(16)
    x = torch.randn(1, 7, 16, requires_grad=True)
    before = kept_numbers(lambda: norm(x))
    fuse(norm)
    assert kept_numbers(lambda: norm(x)) == 7 * 16 + 7 < before


def test_an_mlp_keeps_its_input_and_two_products():
    mlp = LlamaMLP(LlamaConfig(**SHAPE))
    x = torch.randn(1, 7, 16, requires_grad=True)
    assert kept_numbers(lambda: mlp(x)) == 7 * (16 + 4 * 24)
    fuse(mlp)
    assert kept_numbers(lambda: mlp(x)) == 7 * (16 + 2 * 24)


def test_what_is_not_known_is_left_alone():
    # Gemma's norm multiplies by 1 + w and its MLP has another gate; a layer norm takes off the mean.
    gemma = GemmaForCausalLM(GemmaConfig(**SHAPE, head_dim=4))
    gemma.set_attn_implementation(NAME)
    fuse(gemma)
    fuse_blocks(gemma)
    assert taken_over(gemma) <= {"Embedding"}
    layer_norm = nn.LayerNorm(16, bias=False)
    fuse(layer_norm)
    assert taken_over(layer_norm) == set()


def test_blocks_with_a_window_are_left_to_transformers():
    for window, names in ((8, set()), (None, {"MistralModel", "MistralDecoderLayer"})):
        model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=window))
        model.set_attn_implementation(NAME)
        fuse_blocks(model)
        assert taken_over(model) == names


def test_a_fused_model_without_a_layout_says_what_is_wrong():
    _, fused = pair()
    with pytest.raises(RuntimeError, match="attends by layout only"):
        fused(torch.tensor([[5, 6]]))
