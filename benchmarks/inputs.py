"""Models and prompts of the benchmarks that sample."""

from __future__ import annotations

import json
import random
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from extras import need_smollm2
from real_model import fetch_model, write_problems
from tokenizers import AddedToken
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grpo.config.supervised import Pretrain
from grpo.data.records import Message
from grpo.data.template import prompt_tokens
from grpo.training.pretrain import train_tokenizer

NEVER = "<|never|>"
DEMO = Path(__file__).parent.parent / "flows" / "recipes" / "tiny.toml"


def need_model(build: Path) -> None:
    """Stops the benchmark if `smollm2` could not make its model."""
    need_smollm2(build / "real_model")


def smollm2(build: Path) -> Path:
    """SmolLM2-135M-Instruct, where benchmarks/real_model.py has it; fetched and converted if it is not there."""
    folder = build / "real_model"
    folder.mkdir(parents=True, exist_ok=True)
    return fetch_model(folder).resolve()


def demo_model(folder: Path) -> Path:
    """Random weights in the shape of the demo's model (the recipe `tiny`), with a tokenizer of the same size."""
    shape = Pretrain.model_validate(tomllib.loads(DEMO.read_text())["base"]["pretrain"])
    tokenizer = train_tokenizer([*sums(500), *questions(500, folder)], shape)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=shape.hidden,
            intermediate_size=shape.feed_forward,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            max_position_embeddings=shape.context,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
    )
    out = (folder / "demo_model").resolve()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def without_end(model: Path, out: Path) -> Path:
    """A copy of a model's folder, its weights linked, that never ends a completion.

    Its end mark is a token past the end of the vocabulary: there is no logit by which it could be drawn, so completions
    have their full length whoever samples them, and nothing is computed on the way to it.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            (out / file.name).symlink_to(file)
        else:
            shutil.copyfile(file, out / file.name)
    beyond = AutoConfig.from_pretrained(model).vocab_size
    tokenizer = AutoTokenizer.from_pretrained(model)
    pad = tokenizer.pad_token or tokenizer.eos_token
    for number in range(len(tokenizer), beyond):
        tokenizer.add_tokens(AddedToken(f"<|unused {number}|>", special=True))
    tokenizer.add_special_tokens({"eos_token": NEVER, "pad_token": pad})
    if tokenizer.eos_token_id < beyond:
        raise RuntimeError(f"{model}: the new end mark is {tokenizer.eos_token_id}, within the vocabulary of {beyond}")
    tokenizer.save_pretrained(out)
    for name, end in {"config.json": None, "generation_config.json": tokenizer.eos_token_id}.items():
        stored = json.loads((out / name).read_text())
        (out / name).write_text(json.dumps(stored | {"eos_token_id": end}))
    return out.resolve()


def questions(count: int, folder: Path) -> list[str]:
    """Short word problems, some 25 tokens each."""
    path = folder / "questions.jsonl"
    write_problems(path, count)
    return [json.loads(line)["question"] for line in path.read_text().splitlines()]


def sums(count: int) -> list[str]:
    """Sums and differences of three to five digits, as the demo's problems."""
    rng = random.Random(0)
    return [
        " ".join(
            ["compute", str(rng.randint(0, 9)), *(f"{rng.choice('+-')} {rng.randint(0, 9)}" for _ in range(terms))]
        )
        for terms in (2 + number % 3 for number in range(count))
    ]


def as_prompts(texts: Sequence[str]) -> list[list[Message]]:
    return [[{"role": "user", "content": text}] for text in texts]


def long_prompts(count: int, tokens: int, tokenizer: Any, folder: Path) -> list[list[Message]]:
    """Prompts of exactly so many tokens, the chat template's included: word problems one after another, then words of
    one token until the length is right."""
    words = " ".join(questions(count * tokens // 16, folder)).split()
    prompts: list[str] = []
    for _ in range(count):
        text = ""
        while words and _length(tokenizer, f"{text} {words[0]}".strip()) <= tokens:
            text = f"{text} {words.pop(0)}".strip()
        while _length(tokenizer, text) < tokens:
            text += " and"
        if _length(tokenizer, text) != tokens:
            raise RuntimeError(f"no prompt of {tokens} tokens with this tokenizer; the nearest is {text!r}")
        prompts.append(text)
    return as_prompts(prompts)


def _length(tokenizer: Any, text: str) -> int:
    return len(prompt_tokens(tokenizer, as_prompts([text])[0], "chat"))
