"""A judge that is a real model, small enough to train in a test: it compares one answer with one reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpo.config.common import Optimizer
from grpo.config.supervised import Pretrain
from grpo.judging.questions import prompt
from grpo.train import read_job
from grpo.training.pretrain import train_tokenizer
from grpo.training.sft import train_sft
from tests.support.job_runner import CPU, user, write_job

Asked = tuple[str, str, str]
"""Question, reference, answer."""


def train_judge(folder: Path, asked: Sequence[Asked]) -> Path:
    """Trains a model from random weights to reply to the judges' own prompt, "correct" where reference and answer are
    one text. Returns its folder."""
    rows = [
        {"messages": user(prompt("correct", question=q, reference=r, answer=a)), "completion": verdict(r == a)}
        for q, r, a in asked
    ]
    texts = [row["messages"][0]["content"] + row["completion"] for row in rows]
    settings = Pretrain(vocabulary=800, steps=1, context=512, optimizer=Optimizer(learning_rate=1e-3))
    tokenizer = train_tokenizer(texts, settings)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    marks = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=1024, **shape, **marks))
    model.save_pretrained(folder / "random")
    tokenizer.save_pretrained(folder / "random")
    right, wrong = (
        [row for row, (_, r, a) in zip(rows, asked, strict=True) if (r == a) == side] for side in (True, False)
    )
    balanced = wrong + right * max(1, len(wrong) // len(right))
    pq.write_table(pa.Table.from_pylist(balanced), folder / "replies.parquet")
    training = {
        "epochs": 30,
        "batch_size": 32,
        "micro_batch_tokens": 8192,
        "optimizer": {"learning_rate": 3e-3, "final_learning_rate_share": 0.1, "warmup_steps": 10},
        "hardware": CPU,
    }
    job = read_job(
        write_job(folder, "sft", settings=training, model=folder / "random", data=folder / "replies.parquet")
    )
    for place in (job.out, job.state):
        place.mkdir(parents=True, exist_ok=True)
    train_sft(job)  # type: ignore[arg-type]
    return folder / "out"


def verdict(right: bool) -> str:
    return json.dumps({"analysis": "compared", "correctness": "correct" if right else "incorrect"})
