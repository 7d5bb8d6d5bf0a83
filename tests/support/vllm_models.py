"""Where vLLM is, and a model small enough to start it with in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from grpo.config.common import Optimizer
from grpo.config.supervised import Pretrain
from grpo.training.pretrain import train_tokenizer
from tests.support.job_runner import ROOT

PYTHON = ROOT / "build/vllm/bin/python"
needs_vllm = pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not in build/vllm; `make vllm` installs it")


EXPERTS = {
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32},
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            "topk_method": "noaux_tc",  # vLLM reads these two, and real checkpoints have them
            "scoring_func": "sigmoid",
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "num_key_value_heads": 4,
        },
    ),
}
"""Classes and settings of configurations with experts."""


def tiny_experts(kind: str, folder: Path) -> str:
    """A mixture of experts with the tokenizer and sizes of `tiny_llama`, and random weights and router biases."""
    tiny_llama(folder, tied=False)
    sizes = LlamaConfig.from_pretrained(folder).to_dict()
    make, settings = EXPERTS[kind]
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    marks = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "initializer_range")
    config = make(**{name: sizes[name] for name in (*kept, *marks)}, **{"num_key_value_heads": 2, **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    model.save_pretrained(folder)
    return str(folder)


def tiny_llama(folder: Path, tied: bool, layers: int = 3, seed: int = 0) -> str:
    """Random weights, scaled up so that distributions are far from uniform. Its heads are 32 wide: vLLM's CPU kernels
    take multiples of 32, and two of them can be split over two workers. The end mark comes about once in 150 tokens."""
    sums = [f"compute {a} + {b}\nfirst {a + b}" for a in range(10) for b in range(10)]
    tokenizer = train_tokenizer(sums, Pretrain(vocabulary=384, steps=1, optimizer=Optimizer(learning_rate=1e-3)))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    # CPUs draw other weights from the same seed: the end mark gets the row of the token that comes most often.
    prompts = torch.randint(len(tokenizer), (64, 4))
    drawn = model.generate(prompts, do_sample=True, max_new_tokens=48, eos_token_id=[], top_k=0)[:, 4:]
    counts = torch.bincount(drawn.flatten(), minlength=len(tokenizer))
    swapped = [int(counts.argmax()), tokenizer.eos_token_id]
    with torch.no_grad():
        for table in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            table[swapped] = table[swapped[::-1]]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
