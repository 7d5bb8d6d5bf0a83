"""A tiny Llama with random weights and its tokenizer, made with grpo.training.pretrain's own functions."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from grpo.config.common import Hardware, Optimizer
from grpo.config.supervised import Pretrain
from grpo.data.records import Problem, write_rows
from grpo.model.loading import load_policy, load_tokenizer
from grpo.training.pretrain import train_tokenizer
from tests.support.job_runner import PRETRAIN, RL, SFT, run, user, write_job

torch.set_num_threads(1)

SUMS = [(a, b) for a in range(9) for b in range(9)]
CORPUS = [f"What is {a} + {b}? {a} + {b} = {a + b}\n<think>\nadd {a} and {b}\n</think>" for a, b in SUMS]


@pytest.fixture(autouse=True)
def random_weights_of_one_seed() -> None:
    """A test that builds a model without a seed builds the same one in every run."""
    torch.manual_seed(0)


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


@pytest.fixture(scope="session")
def plain(model_folder):
    """The same model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    said = "User: What is {} + {}?\nAssistant:<think>add</think><answer>{}</answer>"
    sums = [said.format(a, b, a + b) for a in range(5) for b in range(5)]
    (folder / "corpus.txt").write_text("\n\n".join(sums * 8))
    run(write_job(folder, "pretrain", settings=PRETRAIN, corpus=folder / "corpus.txt"))
    return folder


@pytest.fixture(scope="session")
def sft_fields(base) -> dict:
    """Answers drawn at random, so that the policy trained on them is right sometimes: RL needs the variance."""
    rng = random.Random(0)
    questions = [user(f"What is {a} + {b}?") for a in range(5) for b in range(5)]
    completions = [f"<think>add</think><answer>{rng.randint(1, 3)}</answer>" for _ in questions]
    rows = [{"messages": q, "completion": c} for q, c in zip(questions, completions, strict=True)]
    pq.write_table(pa.Table.from_pylist(rows), base / "sft.parquet")
    return {"settings": SFT, "model": base / "out", "data": base / "sft.parquet"}


@pytest.fixture(scope="session")
def sft(sft_fields, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    run(write_job(folder, "sft", **sft_fields))
    return folder


@pytest.fixture(scope="session")
def problems(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("problems")
    rows = [
        Problem(f"{a}+{b}", user(f"What is {a} + {b}?"), str(a + b), "number", "reasoning", "en", "test")
        for a in range(4)
        for b in range(1, 4)
        if a + b <= 3
    ]
    general = [Problem(f"g{i}", user(f"Say {i}"), "", "none", "general", "en", "test") for i in range(4)]
    write_rows(folder / "problems.parquet", rows + general, Problem)
    return folder / "problems.parquet"


@pytest.fixture(scope="session")
def rl_fields(sft, problems) -> dict:
    return {"settings": RL, "model": sft / "out", "problems": [problems]}


@pytest.fixture(scope="session")
def rl(rl_fields, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rl")
    run(write_job(folder, "rl", **rl_fields))
    return folder


@pytest.fixture(scope="session")
def reward_models(sft, tmp_path_factory) -> dict[str, Path]:
    """Trained on what is plain to see: 'yes' is better, and safer, than 'no'."""
    folders = {}
    pairs = [
        {"messages": user(f"Say {i}"), "chosen": f"yes {i % 7}", "rejected": f"no {i % 5}", "held_out": i % 4 == 0}
        for i in range(40)
    ]
    points = [
        {"messages": user(f"Say {i % 7}"), "response": ["no", "yes"][i % 2], "label": i % 2, "held_out": i % 8 < 2}
        for i in range(40)
    ]
    settings = {**SFT, "optimizer": {"learning_rate": 0.003, "warmup_steps": 4, "final_learning_rate_share": 0.1}}
    for loss, rows in (("pairs", pairs), ("points", points)):
        folder = tmp_path_factory.mktemp(loss)
        pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
        fields = {"settings": settings, "model": sft / "out", "data": folder / "data.parquet", "loss": loss}
        run(write_job(folder, "reward_model", **fields))
        folders[loss] = folder
    return folders
