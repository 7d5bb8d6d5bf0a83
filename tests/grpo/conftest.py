"""A tiny Llama with random weights and its tokenizer, made with grpo.pretrain's own functions."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpo.config import Hardware, Optimizer, Pretrain
from grpo.policy import load_policy, load_tokenizer
from grpo.pretrain import train_tokenizer

torch.set_num_threads(1)

SUMS = [(a, b) for a in range(9) for b in range(9)]
CORPUS = [f"What is {a} + {b}? {a} + {b} = {a + b}\n<think>\nadd {a} and {b}\n</think>" for a, b in SUMS]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> str:
    """Random weights, scaled up so that distributions are far from uniform and mistakes show."""
    settings = Pretrain(vocabulary=320, steps=1, context=128, optimizer=Optimizer(learning_rate=1e-3))
    tokenizer = train_tokenizer(CORPUS, settings)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
            initializer_range=0.3,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
    )
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    return load_tokenizer(model_folder)


@pytest.fixture(scope="session")
def policy(model_folder):
    return load_policy(model_folder, Hardware(device="cpu"))
