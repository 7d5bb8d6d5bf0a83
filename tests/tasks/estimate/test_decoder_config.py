"""Sizes read from config.json files as they are on the hub, against the models that transformers makes of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.tiny_models import tiny_config
from tasks.estimate.architecture import Architecture
from tasks.estimate.decoder_config import NOT_ADAPTED, NOT_GATED, DecoderConfig, Experts

ROOT = Path(__file__).parents[3]


def sizes(layers: int, hidden: int, feed_forward: int, heads: int, key_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
    }


UNTIED = {"tie_word_embeddings": False}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LITE = {"q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
GEMMA_4B = {
    "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
}  # fmt: skip
# Sizes as in config.json on the hub, and the number of weights that its page or the model's paper gives, in billions.
HUB: dict[str, tuple[float, dict[str, Any]]] = {
    "Qwen2.5-0.5B": (
        0.494,
        {"model_type": "qwen2", "tie_word_embeddings": True, **sizes(24, 896, 4864, 14, 2, 151936)},
    ),
    "Qwen2.5-7B": (7.62, {"model_type": "qwen2", **UNTIED, **sizes(28, 3584, 18944, 28, 4, 152064)}),
    "Llama-3.1-8B": (8.03, {"model_type": "llama", **UNTIED, **sizes(32, 4096, 14336, 32, 8, 128256)}),
    "Phi-3-mini": (3.82, {"model_type": "phi3", **UNTIED, **sizes(32, 3072, 8192, 32, 32, 32064)}),
    "gemma-3-270m": (0.268, {"model_type": "gemma3_text", "head_dim": 256, **sizes(18, 640, 2048, 4, 1, 262144)}),
    "gemma-3-1b": (1.0, {"model_type": "gemma3_text", "head_dim": 256, **sizes(26, 1152, 6912, 4, 1, 262144)}),
    # Without heads and vocabulary, which are its type's; 4.3 B with what sees.
    "gemma-3-4b": (3.88, {"model_type": "gemma3", "text_config": GEMMA_4B}),
    "starcoder2-3b": (3.03, {"model_type": "starcoder2", **sizes(30, 3072, 12288, 24, 2, 49152)}),
    "Qwen3-30B-A3B": (
        30.5,
        {
            "model_type": "qwen3_moe", **UNTIED, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
            **sizes(48, 2048, 6144, 32, 4, 151936),
        },
    ),
    "Mixtral-8x7B": (
        46.7,
        {
            "model_type": "mixtral", **UNTIED, "num_local_experts": 8, "num_experts_per_tok": 2,
            **sizes(32, 4096, 14336, 32, 8, 32000),
        },
    ),
    "OLMoE-1B-7B": (
        6.92,
        {
            "model_type": "olmoe", **UNTIED, "num_experts": 64, "num_experts_per_tok": 8,
            **sizes(16, 2048, 1024, 16, 16, 50304),
        },
    ),
    "DeepSeek-V2-Lite": (
        15.7,
        {
            "model_type": "deepseek_v2", **UNTIED, **LATENT, **LITE, "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1, **sizes(27, 2048, 10944, 16, 16, 102400),
        },
    ),
    "Moonlight-16B-A3B": (
        16.0,
        {
            "model_type": "deepseek_v3", **UNTIED, **LATENT, **LITE, "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1, **sizes(27, 2048, 11264, 16, 16, 163840),
        },
    ),
    "DeepSeek-V3": (
        671,
        {
            "model_type": "deepseek_v3", **UNTIED, **LATENT, "q_lora_rank": 1536, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3, **sizes(61, 7168, 18432, 128, 128, 129280),
        },
    ),
    "GLM-4.5-Air": (
        106,  # 107 here: the page rounds down
        {
            "model_type": "glm4_moe", **UNTIED, "attention_bias": True, "head_dim": 128, "n_routed_experts": 128,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1, **sizes(46, 4096, 10944, 96, 8, 151552),
        },
    ),
    "gpt-oss-20b": (
        20.9,
        {
            "model_type": "gpt_oss", **UNTIED, "attention_bias": True, "head_dim": 64, "num_local_experts": 32,
            "num_experts_per_tok": 4, **sizes(24, 2880, 2880, 64, 8, 201088),
        },
    ),
    "ERNIE-4.5-21B-A3B": (
        21.8,
        {
            "model_type": "ernie4_5_moe", "tie_word_embeddings": True, "moe_num_experts": 64, "moe_k": 6,
            "moe_num_shared_experts": 2, "moe_intermediate_size": 1536, "moe_layer_start_index": 1,
            "moe_layer_interval": 1, **sizes(28, 2560, 12288, 20, 4, 103424),
        },
    ),
    "Llama-4-Scout": (
        107.8,  # 109 with what sees
        {"model_type": "llama4", "text_config": {
            "model_type": "llama4_text", "head_dim": 128, "intermediate_size_mlp": 16384, "num_local_experts": 16,
            "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, **sizes(48, 5120, 8192, 40, 8, 202048),
        }},
    ),
}  # fmt: skip


def made(config: Any) -> int:
    """Parameters of the decoder as transformers makes it, without any memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", HUB)
def test_weights_are_those_of_the_model_and_of_its_page(name: str) -> None:
    billions, config = HUB[name]
    weights = Architecture.from_config(config).weights()
    assert weights == pytest.approx(made(AutoConfig.for_model(**config).get_text_config()), rel=0.002)
    assert weights / 1e9 == pytest.approx(billions, rel=0.01)


def test_without_a_rank_queries_are_one_matrix() -> None:
    a = Architecture.from_config(HUB["DeepSeek-V2-Lite"][1])
    # queries 2048 x 16 x (128 + 64); down to 512 and a rotary key of 64, up to 16 x (128 + 128); outputs 16 x 128
    queries, keys = 2048 * 16 * 192, 2048 * (512 + 64) + 512 * 16 * 256
    assert a.attention_weights == queries + keys + 16 * 128 * 2048 + 512
    assert a.latent and a.latent.query_rank is None


def test_a_tie_is_the_texts_else_the_models_else_its_types() -> None:
    text = {"model_type": "llama", **sizes(2, 8, 16, 2, 2, 50)}
    model: dict[str, Any] = {"model_type": "llava", "text_config": text}
    assert Architecture.from_config(model).tied is False
    assert Architecture.from_config({**model, "tie_word_embeddings": True}).tied is True
    both = {**model, "tie_word_embeddings": True, "text_config": {**text, **UNTIED}}
    assert Architecture.from_config(both).tied is False
    gemma = {"model_type": "gemma2", **sizes(2, 8, 16, 2, 2, 50)}
    assert Architecture.from_config(gemma).tied is True and Architecture.from_config({**gemma, **UNTIED}).tied is False
    # Of a type that transformers does not know, what is written is all there is.
    unknown = {"model_type": "nobody", "text_config": {"model_type": "nobodys_text", **sizes(2, 8, 16, 2, 2, 50)}}
    assert Architecture.from_config(unknown) == Architecture.from_config(sizes(2, 8, 16, 2, 2, 50))


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({}, 0),
        ({"first_k_dense_replace": 2}, 2),
        ({"decoder_sparse_step": 2}, 4),  # layers 1, 3, 5, 7 are sparse
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, 5),
        ({"moe_layer_start_index": 3}, 3),
        ({"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5}, 3),
        ({"moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1]}, 1),
        ({"expert_layer_period": 4, "expert_layer_offset": 2}, 6),  # layers 2 and 6
    ],
)
def test_layers_without_experts_are_found_whatever_names_them(fields: dict[str, Any], dense: int) -> None:
    config = {**UNTIED, **sizes(8, 8, 16, 2, 2, 50), "num_experts": 4, "num_experts_per_tok": 2}
    assert DecoderConfig({**config, **fields}).experts == Experts(4, 2, 0, 16, dense)


@pytest.mark.parametrize("shared", [{"num_shared_experts": 2}, {"shared_expert_intermediate_size": 14}])
def test_shared_experts_have_a_number_or_a_width(shared: dict[str, Any]) -> None:
    config = {**UNTIED, **sizes(8, 8, 16, 2, 2, 50), "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 7}
    assert DecoderConfig({**config, **shared}).experts == Experts(4, 2, 2, 7, 0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ffn_num_experts": 8}, "ffn_num_experts: experts in fields that are not known here"),
        ({"moe_blocks": 8}, "moe_blocks: experts in fields that are not known here"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many', and must be a whole number"),
        ({"hidden_size": 0}, "hidden_size is 0, and must be above 0"),
        ({"num_attention_heads": [2, 4]}, r"num_attention_heads is \[2, 4\], and must be a whole number"),
        ({"vocab_size": True}, "vocab_size is True"),
        (
            {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": 1},
            "mlp_only_layers is 1, and must be a list",
        ),
        ({"hidden_size_per_layer_input": 256}, "embeddings in each layer are not counted"),
    ],
)
def test_what_cannot_be_counted_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Architecture.from_config({**UNTIED, **sizes(8, 8, 16, 2, 2, 50), **fields})


@pytest.mark.parametrize("config", [None, [], "llama", 3, [{"hidden_size": 8}]])
def test_what_is_no_object_is_refused(config: Any) -> None:
    with pytest.raises(ValueError, match="it is no JSON object"):
        Architecture.from_config(config)


def test_experts_without_a_number_of_those_that_are_active_are_refused() -> None:
    with pytest.raises(KeyError, match="num_experts_per_tok"):
        Architecture.from_config({**UNTIED, **sizes(8, 8, 16, 2, 2, 50), "num_experts": 4})


@pytest.mark.parametrize("kind", sorted(NOT_GATED))
def test_blocks_without_a_gate_have_two_matrices(kind: str) -> None:
    config = tiny_config(kind)
    assert Architecture.from_config(config.to_dict()).weights() == pytest.approx(made(config), rel=0.05)  # less biases


WRAPPED = ["qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe"]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_oss", "qwen2_moe", "granitemoe", *WRAPPED])
def test_adapters_are_those_that_peft_makes(kind: str) -> None:
    from peft import LoraConfig, get_peft_model

    config = tiny_config(kind)
    a = Architecture.from_config(config.to_dict())
    assert a.experts is None or a.experts.adapted == (kind not in NOT_ADAPTED) == (kind in WRAPPED)
    with torch.device("meta"):
        policy: Any = AutoModelForCausalLM.from_config(config)
        adapted = get_peft_model(policy, LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    # Exact, but for the gate of a shared expert, 33 numbers a rank in Qwen2's.
    assert a.adapter_weights(3) == trained - (4 * 3 * 33 if kind == "qwen2_moe" else 0)


def test_adapters_of_experts_by_hand() -> None:
    """A layer of Qwen3-30B-A3B: attention with 32 heads and 4 of keys, a router, and 128 experts whose gate and up are
    one tensor with twice the rank."""
    a = Architecture.from_config({**HUB["Qwen3-30B-A3B"][1], "num_hidden_layers": 2})
    attention = 2 * (2048 + 4096) + 2 * (2048 + 512)
    experts = 128 * (2 * (2048 + 2 * 768) + 768 + 2048)
    assert a.adapter_weights(32) == 2 * 32 * (attention + 2048 + 128 + experts) == 83_042_304


def test_a_config_with_all_sizes_is_read_without_transformers() -> None:
    code = (
        "import sys; from tasks.estimate.architecture import Architecture;"
        "from tasks.estimate.published import PUBLISHED;"
        "[Architecture.from_config({'model_type': 'qwen2', **config}) for config in PUBLISHED.values()];"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "set()"
