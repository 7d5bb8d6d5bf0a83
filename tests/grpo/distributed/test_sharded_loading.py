"""Models that are read shard by shard: what a process holds, and what comes out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.tiny_models import build
from grpo.config.experts import Experts
from grpo.model.loading import REWARD_MODEL, load_model, load_tokenizer
from grpo.scoring.step_model import MARK
from tests.support import parallel_jobs, shard_jobs

pytestmark = pytest.mark.system

LAYER = 4 * 512 * 512 + 3 * 512 * 1536 + 2 * 512
"""Weights of a layer of `large`: four projections of attention, three of the MLP, two norms."""
LAYERS = 16
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
MB = 1e6


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def team(request):
    started = parallel_jobs.Team(request.param)
    yield started
    started.dismiss()


@pytest.mark.parametrize("way", ["shards", "adapters", SLOW("reward model"), SLOW("value model")])
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_process_holds_its_shares_and_the_first_layer(count: int, way: str, tmp_path: Path) -> None:
    build("llama", tmp_path / "small")
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": LAYERS, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, tie_word_embeddings=False, **sizes))
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert whole == 4 * (LAYERS * LAYER + 2 * 512 * 512 + 512)  # 218 MB
    model.bfloat16().save_pretrained(tmp_path / "large")  # read as float32: no process can just map the file
    team = parallel_jobs.Team(count)  # a new one: processes keep the memory that they have freed
    try:
        costs = team(shard_jobs.cost_of_loading, str(tmp_path / "small"), str(tmp_path / "large"), way)
    finally:
        team.dismiss()
    for cost in costs:
        allowed = 1.3 * whole / count + 4 * LAYER + 8 * MB
        assert whole / count < cost["bytes"] < allowed, f"{cost['bytes'] / MB:.0f} of {whole / MB:.0f} MB"


def test_a_copy_is_never_whole_in_memory(tmp_path: Path) -> None:
    build("llama", tmp_path / "small")
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2 * LAYERS, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, tie_word_embeddings=False, **sizes)).bfloat16()
    whole = 2 * sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(tmp_path / "large")
    team = parallel_jobs.Team(1)
    try:
        places = [str(tmp_path / name) for name in ("small", "large", "copy")]
        (cost,) = team(shard_jobs.cost_of_copying, *places)
    finally:
        team.dismiss()
    assert cost["bytes"] < whole / 2, f"{cost['bytes'] / MB:.0f} of {whole / MB:.0f} MB"


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_its_shares_are_those_of_the_files(kind: str, team: parallel_jobs.Team, tmp_path: Path) -> None:
    build(kind, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for found in team(shard_jobs.loaded, str(tmp_path)):
        assert found["share"] < 1.2 / len(team.processes)
        for name, weight in found["weights"].items():
            if name in saved:  # experts are in other files' forms one by one
                np.testing.assert_array_equal(weight, saved[name], err_msg=name)
        assert len(found["weights"].keys() & saved.keys()) > 10


@pytest.mark.parametrize("kind", ["llama", "gemma2", SLOW("qwen3_moe")])  # gemma2's embeddings are its head as well
def test_a_value_model_is_the_policys_transformer_under_a_new_head(
    kind: str, team: parallel_jobs.Team, tmp_path: Path
) -> None:
    build(kind, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for found in team(shard_jobs.loaded, str(tmp_path), None, "value model"):
        assert found["share"] < 1.2 / len(team.processes)
        assert not found["weights"].pop("head.weight").any() and not found["weights"].pop("head.bias").any()
        weights = {name.replace("trunk.", "model."): weight for name, weight in found["weights"].items()}
        for name in weights.keys() & saved.keys():
            np.testing.assert_array_equal(weights[name], saved[name], err_msg=name)
        assert len(weights.keys() & saved.keys()) > 10 and "lm_head.weight" not in weights


@pytest.mark.parametrize("seed", [3, SLOW(4)])
def test_a_reward_models_new_head_is_the_one_that_a_process_alone_draws(
    seed: int, team: parallel_jobs.Team, tmp_path: Path
) -> None:
    build("llama", tmp_path / "policy")
    torch.manual_seed(seed)
    alone = load_model(REWARD_MODEL, str(tmp_path / "policy"), shard_jobs.CPU)
    alone.save_pretrained(tmp_path / "reward model")
    head = alone.score.weight.detach().numpy()
    assert head.std() > 0
    for folder, drawn in (("policy", seed), ("reward model", seed + 10)):
        for found in team(shard_jobs.loaded, str(tmp_path / folder), None, "reward model", drawn):
            np.testing.assert_array_equal(found["weights"]["score.weight"], head)
            assert found["share"] < 1.2 / len(team.processes)


@pytest.mark.parametrize("job", [shard_jobs.scored, shard_jobs.steps_scored])
def test_reward_models_score_a_layer_at_a_time_and_as_often_in_each_process(
    job: Callable[..., Any], team: parallel_jobs.Team, model_folder: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = load_model(REWARD_MODEL, model_folder, shard_jobs.CPU)
    model.config.update({"pad_token_id": 0, MARK: "hard"})
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path)
    load_tokenizer(model_folder).save_pretrained(tmp_path)
    alone, found = job(None, str(tmp_path), 4)["rows"], team(job, str(tmp_path), 4)
    np.testing.assert_allclose([*found[0]["rows"], *found[1]["rows"]], alone, atol=1e-5)
    assert len(found[1]["rows"]) == len(alone) // 4 and np.std(alone) > 0.01
    for process in found:
        assert process["calls"] == 3
        assert process["rest"] < process["most"] <= process["rest"] + 2 * process["part"]
        assert process["left"] == []


def test_a_weight_that_transformers_joins_wrongly_is_noticed(team: parallel_jobs.Team, tmp_path: Path) -> None:
    """Kimi Linear's convolutions are three weights in the file and one in the model; of their shards it joins the first
    rows of each."""
    build("kimi_linear", tmp_path)
    found = team(shard_jobs.loaded, str(tmp_path))
    parts = load_file(tmp_path / "model.safetensors")
    three = [parts[f"model.layers.0.self_attn.{name}_conv1d.weight"] for name in "qkv"]
    for process in found:
        np.testing.assert_array_equal(
            process["weights"]["model.layers.0.self_attn.conv1d.weight"], np.concatenate(three)
        )


@pytest.mark.parametrize("way", ["shards", "adapters"])
def test_routers_of_all_layers_are_frozen(way: str, team: parallel_jobs.Team, tmp_path: Path) -> None:
    build("qwen3_moe", tmp_path)
    for found in team(shard_jobs.loaded, str(tmp_path), Experts(routers="frozen"), way):
        assert found["frozen"] == [True] * 4
        assert found["experts"] == [4] * 4


def test_measuring_gathers_a_layer_at_a_time_and_as_often_in_each_process(
    team: parallel_jobs.Team, tmp_path: Path
) -> None:
    build("llama", tmp_path)
    expected = shard_jobs.alone(tmp_path, 4)
    found = team(shard_jobs.measured, str(tmp_path), 4)
    np.testing.assert_allclose(found[0]["rows"], expected[:3], atol=1e-5)
    np.testing.assert_allclose(found[1]["rows"], expected[3:], atol=1e-5)
    for process in found:
        assert process["calls"] == 3  # a process with one completion, or none, joins in the others' calls
        assert process["rest"] < process["most"] <= process["rest"] + 2 * process["part"]
        assert process["left"] == []


def test_a_model_whose_blocks_share_weights_is_refused(team: parallel_jobs.Team, tmp_path: Path) -> None:
    build("zamba2", tmp_path)
    for said in team(shard_jobs.refusal, str(tmp_path)):
        assert "uses weights in several of its blocks" in said and "\n" not in said
