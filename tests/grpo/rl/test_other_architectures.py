"""Ten steps of GRPO for architectures unlike Llama; what comes out is loaded and sampled by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.tiny_models import build
from grpo.model.loading import load_tokenizer
from tests.support.job_runner import RL, metrics, run_here, write_job

STEPS = 10
REWARD = f"{__name__}:share_of_letters"


def share_of_letters(_: Any, response: Any) -> float:
    """A reward in which the completions of a random model differ."""
    return sum(map(str.isalpha, response.text)) / max(1, len(response.text))


@pytest.mark.system
@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "cohere2", "granite", "gemma3_text", "gpt_oss"])
def test_it_trains_and_transformers_samples_it(
    kind: str, model_folder: str, rl_fields: dict[str, Any], tmp_path: Path
) -> None:
    start = tmp_path / "model"
    tokenizer = load_tokenizer(model_folder)
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    build(kind, start, vocab_size=len(tokenizer), **ends)
    tokenizer.save_pretrained(start)
    settings = {**RL, "steps": STEPS, "rewards": {REWARD: 1}, "hardware": {"device": "cpu"}}
    run_here(write_job(tmp_path / "job", "rl", **{**rl_fields, "model": str(start), "settings": settings}))

    records = metrics(tmp_path / "job")
    assert len(records) == STEPS
    differences = [record["logprob_mismatch"] for record in records if "logprob_mismatch" in record]
    assert differences
    assert max(differences) < 1e-3
    out = tmp_path / "job" / "out"
    before = weights_of(start)
    assert any(not torch.equal(weight, before[name]) for name, weight in weights_of(out).items())

    model, read = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    ids = read("What is 2 + 3?", return_tensors="pt")["input_ids"]
    written = model.generate(ids, max_new_tokens=5, do_sample=True)
    assert written.shape[1] > ids.shape[1]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}
