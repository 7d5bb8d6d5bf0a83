"""`r1 plan` tells how a base model in a local folder would run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from benchmarks.tiny_models import build
from flows.cli import plan_model
from flows.recipe.load import load_recipe
from grpo.errors import InputError


def found(folder: Path, *overrides: str, stages: list[str] | None = None) -> dict[str, Any] | None:
    return plan_model.check(load_recipe("smollm2-135m", [f"base.model={folder}", *overrides]), stages)


def with_tokenizer(kind: str, folder: Path) -> None:
    """A tiny model of this type in `folder`, with a tokenizer of two words."""
    build(kind, folder)
    words = WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="[UNK]", eos_token="</s>")
    tokenizer.save_pretrained(folder)


@pytest.mark.system
def test_a_model_that_runs_packed(tmp_path: Path) -> None:
    with_tokenizer("llama", tmp_path)
    result = found(tmp_path)
    assert result == {"attention": "packed", "reason": None, "by_transformers": ""}
    assert plan_model.describe(result) == "base.model runs packed"


@pytest.mark.system
def test_a_model_that_runs_plain_says_why(tmp_path: Path) -> None:
    with_tokenizer("bloom", tmp_path)
    result = found(tmp_path)
    assert result and result["attention"] == "plain"
    line = plan_model.describe(result)
    assert line.startswith("base.model runs plain, not packed (") and "first in h.0.self_attention" in line


@pytest.mark.system
def test_what_transformers_does_is_said(tmp_path: Path) -> None:
    with_tokenizer("bamba", tmp_path)
    result = found(tmp_path)
    assert result
    expected = "base.model runs packed (BambaMixer on rows of one sequence; sampled by transformers' generate)"
    assert plan_model.describe(result) == expected


@pytest.mark.system
def test_the_recipes_attention_is_checked(tmp_path: Path) -> None:
    with_tokenizer("bloom", tmp_path)
    asked = 'sft.hardware.attention="packed"'
    with pytest.raises(InputError, match=r"base.model in sft: .*hardware.attention = 'packed' computes something else"):
        found(tmp_path, asked)
    result = found(tmp_path, asked, stages=["base", "reasoning_rl"])  # a flow without that stage
    assert result and result["attention"] == "plain"
    result = found(tmp_path, 'sft.hardware={attention="plain",fused=false}', stages=["reasoning_rl", "sft"])
    assert result and [result["stages"], *(other["stages"] for other in result["others"])] == [
        ["reasoning_rl"],
        ["sft"],
    ]
    line = plan_model.describe(result)
    assert line.endswith("docs/models.md in reasoning_rl; base.model runs plain in sft")


@pytest.mark.system
def test_a_model_that_cannot_run_is_one_line(tmp_path: Path) -> None:
    build("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    with pytest.raises(InputError, match=r"base.model: .*weights are missing") as error:
        found(tmp_path)
    assert "\n" not in str(error.value)


def test_hub_names_are_not_fetched() -> None:
    assert plan_model.check(load_recipe("smollm2-135m", ["base.model=organisation/model"])) is None


def test_a_model_beyond_memory_is_not_loaded(tmp_path: Path) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(memory)  # takes no room on the disk
    result = found(tmp_path)
    assert result and result["attention"] is None
    assert "too large to load here" in plan_model.describe(result)
