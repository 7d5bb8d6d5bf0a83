"""TRL trains on the data sets that we write, as they are: two steps of its SFTTrainer, RewardTrainer and
GRPOTrainer; of problems two columns are renamed, as the card of `r1 export` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import datasets
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from grpo.config.common import Optimizer
from grpo.config.supervised import Pretrain
from grpo.data.records import Problem, Sample, write_rows
from grpo.data.template import render
from grpo.training.pretrain import train_tokenizer
from tasks.preferences.rows import pair_row, write_preferences
from tasks.sft_data.card import write_card
from tasks.sft_data.examples import example, write_examples
from tasks.sft_data.mix import mix
from tasks.sft_data.mix_settings import MixSettings

pytestmark = pytest.mark.system
SUMS = [
    Problem(str(i), [{"role": "user", "content": f"{i} + 1"}], str(i + 1), "number", "reasoning", "en", "sums")
    for i in range(16)
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    settings = Pretrain(vocabulary=320, steps=1, context=128, optimizer=Optimizer(learning_rate=1e-3))
    return train_tokenizer([f"{problem.text} is {problem.answer}" for problem in SUMS] * 8, settings)


def tiny(kind: Any, tokenizer: Any) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return kind(LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, num_labels=1, **shape))


def options(tmp_path: Path) -> dict[str, Any]:
    short = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_length": 128}
    return {"output_dir": str(tmp_path / "trl"), "report_to": [], "use_cpu": True, "logging_steps": 1, **short}


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def mixed(folder: Path) -> datasets.Dataset:
    """A data set of the factory, opened by its card."""
    samples = [
        Sample(
            problem.id, "p", render(f"{problem.text} is {problem.answer}", problem.answer), "", problem.answer, "", {},
            9, "stop", "reasoning", "en", source="sums", verdict="kept",
        )
        for problem in SUMS
    ]  # fmt: skip
    write_rows(folder / "samples.parquet", samples, Sample)
    known = {problem.id: problem for problem in SUMS}
    write_card(folder, mix([folder / "samples.parquet"], lambda _: known, MixSettings(), 0, folder), {})
    return datasets.load_dataset(str(folder), cache_dir=str(folder / "cache"))["train"]


def demonstrated(folder: Path) -> datasets.Dataset:
    """Cold-start examples."""
    write_examples(folder / "data", [example(problem, render("so", problem.answer)) for problem in SUMS])
    return datasets.Dataset.from_parquet(str(folder / "data" / "part-00000.parquet"), cache_dir=str(folder / "cache"))


@pytest.mark.parametrize("made", [mixed, demonstrated])
def test_sft(made: Any, tokenizer: Any, tmp_path: Path) -> None:
    data = made(tmp_path)
    arguments = SFTConfig(**options(tmp_path), completion_only_loss=True)
    trainer = SFTTrainer(tiny(LlamaForCausalLM, tokenizer), arguments, train_dataset=data, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    learnt = tokenizer.batch_decode([row[row != -100] for row in batch["labels"]])
    assert all(text.startswith("<think>") for text in learnt)  # the completion alone
    assert len(losses(trainer)) == 2


def test_reward_model(tokenizer: Any, tmp_path: Path) -> None:
    rows = [pair_row(p.messages, p.answer, f"{p.answer} or not", 1.0, "judge", 0.0) for p in SUMS]
    write_preferences(tmp_path / "helpful.parquet", rows)
    data = datasets.Dataset.from_parquet(str(tmp_path / "helpful.parquet"), cache_dir=str(tmp_path / "cache"))
    model = tiny(LlamaForSequenceClassification, tokenizer)
    arguments = RewardConfig(**options(tmp_path))
    trainer = RewardTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    assert len(losses(trainer)) == 2


def test_grpo(tokenizer: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.parquet", SUMS, Problem)
    data = datasets.Dataset.from_parquet(str(tmp_path / "train.parquet"), cache_dir=str(tmp_path / "cache"))
    data = data.rename_columns({"messages": "prompt", "answer": "solution"})
    asked: list[tuple[str, str]] = []

    def reward(completions: list[Any], prompts: list[Any], solution: list[str], **_: Any) -> list[float]:
        asked.extend(zip((prompt[0]["content"] for prompt in prompts), solution, strict=True))
        return [float(gold in completion[0]["content"]) for completion, gold in zip(completions, solution, strict=True)]

    shared = {name: value for name, value in options(tmp_path).items() if name != "max_length"}
    arguments = GRPOConfig(**shared, num_generations=2, max_completion_length=8)
    model = tiny(LlamaForCausalLM, tokenizer)
    trainer = GRPOTrainer(model, reward, arguments, train_dataset=data, processing_class=tokenizer)
    assert len(losses(trainer)) == 2
    assert asked and all(sum_of(question) == gold for question, gold in asked)


def sum_of(question: str) -> str:
    left, right = question.split(" + ")
    return str(int(left) + int(right))
