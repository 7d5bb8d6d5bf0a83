"""The first blocks of a model stand for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.tiny_models import build, tiny_config
from grpo.config.common import Hardware
from grpo.model.lm_head import backbone_of
from grpo.model.loading import decide_way, load_policy
from grpo.model.sharded.first_blocks import FirstBlocks, on_meta


def described(kind: str, **changes: Any) -> Any:
    return on_meta(AutoModelForCausalLM, tiny_config(kind, **changes), torch.float32)


@pytest.mark.parametrize(
    ("kind", "like"),
    [
        ("llama", [0, 0, 0, 0]),
        ("deepseek_v3", [0, 1, 1, 1]),  # first_k_dense_replace = 1
        ("gemma2", [0, 0, 2, 2]),  # layer_types: sliding, sliding, full, full
        ("dbrx", [0, 0, 0, 0]),  # whose field for the number of blocks has a name of its own
    ],
)
def test_the_first_block_of_each_kind_is_kept(kind: str, like: list[int]) -> None:
    first = FirstBlocks.of(described(kind))
    assert first is not None and first.like == like
    short = on_meta(AutoModelForCausalLM, first.config, torch.float32)
    assert len(short.get_submodule(first.path)) == max(like) + 1


def test_a_model_whose_last_block_is_the_first_of_its_kind_is_not_shortened() -> None:
    assert FirstBlocks.of(described("llama", num_hidden_layers=1)) is None
    assert FirstBlocks.of(described("deepseek_v3", first_k_dense_replace=3)) is None


def test_blocks_that_share_weights_with_the_rest_are_not_cut_off() -> None:
    """BERT's embeddings, which FSDP gathers by themselves, are its head's weights, too."""
    assert FirstBlocks.of(described("bert")) is None


@pytest.mark.parametrize("kind", ["llama", "qwen3_next", "cohere2", "gpt_oss", "deepseek_v3"])
def test_the_whole_model_runs_as_the_first_blocks_do(kind: str, tmp_path: Path) -> None:
    """What loading a model whole adds to its parts is what they get from the first blocks."""
    build(kind, tmp_path)
    hardware = Hardware(device="cpu")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    first = FirstBlocks.of(whole)
    assert first is not None
    short = AutoModelForCausalLM.from_pretrained(tmp_path, config=first.config)
    decide_way(short, str(tmp_path), hardware)
    first.copy_way(short, whole)
    assert added(whole) == added(load_policy(str(tmp_path), hardware))


def added(model: Any) -> dict[str, Any]:
    marks = {"forward", "changed_for_rows", "attention_for_rows", "own_attention", "decodes_packed"}
    found = {
        f"{name}.{key}": getattr(value, "__func__", value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key in marks
    }
    return found | {"attention": backbone_of(model).config._attn_implementation}
