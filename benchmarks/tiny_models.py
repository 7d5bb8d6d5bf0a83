"""A tiny model of any causal type of the installed transformers, with the kinds of settings of a real checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from grpo.model.rope import reset_rope

VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "multi_query": False,
    "head_dim": 8,
    "attention_head_dim": 8,
    "rotary_dim": 8,
    "d_kv": 8,
    "intermediate_size": 48,
    "n_inner": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "n_ctx": 128,
    "max_seq_len": 128,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "use_cache": True,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 64,
    "ssm_state_size": 8,
    "state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
    "conv_kernel": 4,
    "num_mem_blocks": 1,
    "vision_config": None,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "index_n_heads": 16,  # few have ties, which `topk` breaks by the length of the row
    "index_head_dim": 16,
    "index_topk": 8,
}
"""Sizes of the tiny models by field of their configurations, where they have it."""
EVERY_OTHER = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
MAMBA_OTHER = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 2,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 8,
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 64,
    "split_ngram_parts": 4,
    "make_ngram_vocab_size_divisible_by": 8,
}
ZAMBA = {
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
    "num_key_value_heads": 4,
    "layers_block_type": MAMBA_OTHER,
}
EVERY_LOCAL = ["global", "local", "global", "local"]
OF_TYPE: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
    "granitemoe": {"logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
    "granitemoeshared": {"logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4,
            "long_factor": [1.5, 2.0, 3.0, 4.0],
        }
    },
    "llama:dynamic": {
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    },
    "bamba": {"attn_layer_indices": [2]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "gemma3n": {
        "layer_types": EVERY_OTHER,
        "num_kv_shared_layers": 2,
    },
    "gemma3n_text": {
        "layer_types": EVERY_OTHER,
        "num_kv_shared_layers": 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8, "attention_layers": EVERY_LOCAL},
    "qwen4_exp": QWEN4,
    "qwen4_exp_text": QWEN4,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere_compass_text": {
        "logit_scale": 0.0625,
        "layer_types": EVERY_OTHER,
        "rope_parameters": {name: {**ROPE, "mrope_section": [2, 1, 1]} for name in EVERY_OTHER},
    },
    "xlnet": {"d_head": 8, "d_inner": 48},
    "reformer": {
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [8, 24],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "zamba": {**ZAMBA, "mamba_dt_rank": 2},
    "zamba2": {**ZAMBA, "hybrid_layer_ids": [1, 3], "n_mamba_heads": 4, "mamba_headdim": 16, "num_query_groups": 4},
    "xlstm": {"embedding_dim": 32, "num_blocks": 4, "ffn_round_up_to_multiple_of": 16},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "xmod": {"default_language": "en_XX"},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "mamba2": {"head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    "dots1": {"n_routed_experts": 4, "moe_intermediate_size": 24, "n_shared_experts": 1},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "falcon": {"alibi": False, "new_decoder_architecture": True},
    "bloom": {"hidden_size": 32, "n_head": 4},
}
"""Settings of real checkpoints beside the sizes, where these change what is computed."""
FILLED = ("head_dim", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
"""Fields that real configurations always have, by default None in some classes."""
PROMPTS = [[5, 9, 7, 6, 11, 23, 31, 8, 44, 17], [12, 60, 33]]
LENGTHS = [[19, 12, 25], [16, 21, 5]]
WRONG = 1e-3
"""Largest difference of a log-probability in nats, and of all gradients relative to their norm."""

LEFT_OUT = (
    "transformers_version",
    "model_type",
    "architectures",
    "dtype",
    "per_layer_config",
    "qk_layernorm_config",
    "_name_or_path",
    "output_attentions",
)
"""Fields that a configuration derives from others."""

PROMPT_ROWS = [prompt for prompt, lengths in zip(PROMPTS, LENGTHS, strict=True) for _ in lengths]
_RANDOM = torch.Generator().manual_seed(1)
COMPLETIONS = [
    torch.randint(3, VOCABULARY, (length,), generator=_RANDOM).tolist() for lengths in LENGTHS for length in lengths
]
"""Of each prompt row, tokens."""


def tiny_config(kind: str, **changes: Any) -> Any:
    """A configuration of a few thousand weights with the form of a real one."""
    config = CONFIG_MAPPING[kind.partition(":")[0]]()
    return type(config)(**_shrunk(config, {**OF_TYPE.get(kind, {}), **changes}))


def _shrunk(config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    fields = {name: _value(config, name, value) for name, value in config.to_dict().items()}
    sub_configs = {name for name in getattr(config, "sub_configs", {}) if fields.get(name) is not None}
    smaller = {}
    old_layers = fields.get("num_hidden_layers")
    layers = next((SIZES[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in fields), 4)
    for name, value in fields.items():
        if name in sub_configs:
            smaller[name] = {**_shrunk(getattr(config, name), changes), "model_type": getattr(config, name).model_type}
        elif name in SIZES and value is not None:
            smaller[name] = SIZES[name]
        elif (isinstance(value, list) and name != "layer_types" and len(value) == old_layers) or (
            name == "layer_types" and value
        ):
            smaller[name] = _some_of_each(value, layers)
        elif value is None and name in FILLED:
            smaller[name] = SIZES[name]
        elif name not in LEFT_OUT:
            smaller[name] = value
    if "kv_lora_rank" in fields:
        smaller |= {"num_key_value_heads": 4, "qk_head_dim": 16, "head_dim": 8}
    smaller.update({name: value for name, value in changes.items() if name in fields})
    smaller["dtype"] = "float32"
    return smaller


def _value(config: Any, name: str, written: Any) -> Any:
    try:
        return getattr(config, name, written)
    except Exception:  # a field that only layers have
        return written


def _some_of_each(kinds: list[str], count: int) -> list[str]:
    """`count` layers with each kind at least once, in the order of their first appearance."""
    first = list(dict.fromkeys(kinds))
    return [first[i * len(first) // count] if len(first) < count else first[i] for i in range(count)]


def build(kind: str, folder: Path, **changes: Any) -> None:
    """Writes a model with random weights, large enough that attention is far from uniform. `changes`: of its
    configuration."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)


def alone(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """Log-probabilities of a completion by transformers' forward pass over this sequence only."""
    reset_rope(model)
    ids = torch.tensor([[*prompt, *completion]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(1).gather(1, torch.tensor(completion, device=model.device)[:, None]).squeeze(1)


def gradient_error(own: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """|g - g'| / |g| of all gradients as one vector."""
    total = sum(gradient.double().square().sum() for gradient in own.values())
    difference = sum(
        (own.get(name, 0) - found.get(name, torch.zeros(()))).double().square().sum() for name in own.keys() | found
    )
    return float((difference / total) ** 0.5)
