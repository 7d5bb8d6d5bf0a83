"""Sizes of published models, for estimates without a config.json: the models of the shipped recipes and of
docs/measured/sizes.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo.errors import InputError
from tasks.estimate.architecture import Architecture

_QWEN = {"model_type": "qwen2", "tie_word_embeddings": False}
PUBLISHED: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-0.5B": {
        **_QWEN,
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-1.5B": {
        **_QWEN,
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B": {
        **_QWEN,
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "Qwen/Qwen2.5-14B": {
        **_QWEN,
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
    "Qwen/Qwen2.5-32B": {
        **_QWEN,
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
    "meta-llama/Llama-3.1-70B": {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "deepseek-ai/DeepSeek-V3": {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "tie_word_embeddings": False,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "Qwen/Qwen3-30B-A3B": {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "Qwen/Qwen3-235B-A22B": {
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
    },
    "Qwen/Qwen3-0.6B": {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}
"""Name on the Hugging Face hub -> the sizes in its config.json."""
_SAME_SIZE = {
    "Qwen/Qwen3-0.6B-Base": "Qwen/Qwen3-0.6B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "Qwen/Qwen2.5-1.5B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "Qwen/Qwen2.5-7B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": "Qwen/Qwen2.5-14B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": "Qwen/Qwen2.5-32B",
    "deepseek-ai/DeepSeek-V3-Base": "deepseek-ai/DeepSeek-V3",
}
_UNTIED = {"deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"}


def published(model: str) -> Architecture:
    """The architecture of a published model, by its name on the hub. Raises InputError if it is not in the table."""
    config = PUBLISHED.get(_SAME_SIZE.get(model, model).removesuffix("-Instruct"))
    if config is None:
        raise InputError(f"{model}: its config.json is not on this machine; download it and give it with --config FILE")
    return Architecture.from_config({**config, "tie_word_embeddings": False} if model in _UNTIED else config)


def config_file(model: str) -> Path | None:
    """The config.json in a folder, or of a hub model in the cache; None if it is not on this machine."""
    folder = Path(model).expanduser()
    if folder.exists() or model.startswith((".", "/", "~")):
        return folder / "config.json"
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json")
    return Path(cached) if isinstance(cached, str) else None
