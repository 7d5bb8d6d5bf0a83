"""Processes that share the tokens of their sequences compute what one process computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.tiny_models import build
from tests.support import sequence_jobs
from tests.support.parallel_jobs import ALONE, Team
from tests.support.sequence_jobs import assert_gradients_of_one_process

pytestmark = pytest.mark.system

KINDS = ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma2", "cohere2"]
"""Among them: fewer key heads than query heads, experts, latent attention, sinks and windows, softcaps, scaled
logits."""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    started = Team(request.param)
    yield started
    started.dismiss()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_process(kind: str, team: Team, tmp_path: Path) -> None:
    build(kind, tmp_path)
    assert_gradients_of_one_process(team, tmp_path, len(team.processes), {})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gemma2"])  # torch compiles its softcaps
def test_in_float64_they_differ_by_nothing_else_than_rounding(kind: str, team: Team, tmp_path: Path) -> None:
    build(kind, tmp_path)
    assert_gradients_of_one_process(team, tmp_path, len(team.processes), {}, float64=True)


def test_positions_that_a_layer_counts_itself(team: Team, tmp_path: Path) -> None:
    build("llama4_text", tmp_path, floor_scale=20, attn_scale=2.0)
    assert_gradients_of_one_process(team, tmp_path, len(team.processes), {})


def test_groups_have_micro_batches_of_their_own(team: Team, tmp_path: Path) -> None:
    build("qwen3", tmp_path)
    if len(team.processes) > 2:
        assert_gradients_of_one_process(team, tmp_path, 2, {})


@pytest.mark.parametrize("hardware", [{"gradient_checkpointing": True}, {"fused": False}], ids=str)
def test_with_other_settings(hardware: dict[str, Any], team: Team, tmp_path: Path) -> None:
    build("qwen3", tmp_path)
    assert_gradients_of_one_process(team, tmp_path, len(team.processes), hardware)


def test_adapters(team: Team, tmp_path: Path) -> None:
    build("llama", tmp_path)
    assert_gradients_of_one_process(team, tmp_path, len(team.processes), {}, lora=True)


def test_each_process_has_its_part_of_the_tokens(team: Team, tmp_path: Path) -> None:
    """63 in all: 18 of prompts, and 53 of completions without the last one of each."""
    build("llama", tmp_path)
    size = len(team.processes)
    assert sequence_jobs.tokens_in_mlp(ALONE, str(tmp_path), 1) == 63
    assert team(sequence_jobs.tokens_in_mlp, str(tmp_path), size) == [-(-63 // size)] * size


def test_a_process_keeps_the_activations_of_its_tokens(team: Team, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=96, max_position_embeddings=32768, **sizes)).save_pretrained(tmp_path)
    tokens, size = 8192, len(team.processes)
    peaks = {}
    for world in (1, size):
        new = Team(world)  # new processes: those of other tests hold memory that was freed
        try:
            peaks[world] = new(sequence_jobs.peak_bytes, str(tmp_path), world, tokens)
        finally:
            new.dismiss()
    (alone,) = peaks[1]
    per_token = 2 * 256 + 8 * 64  # of a block: gates, ups, eight states as wide as the model
    assert alone > 4 * tokens * 6 * per_token
    for shared in peaks[size]:
        assert shared < 1.5 * alone / size, f"{shared / 1e6:.0f} of {alone / 1e6:.0f} MB"


def test_values_too(team: Team, tmp_path: Path) -> None:
    build("llama", tmp_path)
    values, gradient = sequence_jobs.values(ALONE, str(tmp_path), 1)
    for found, shared in team(sequence_jobs.values, str(tmp_path), len(team.processes)):
        np.testing.assert_allclose(found, values, atol=1e-5)
        np.testing.assert_allclose(shared, gradient, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "size", "hardware", "why"),
    [
        ("llama", 2, {"attention": "plain"}, "runs plain here, and only packed sequences can be shared"),
        ("qwen3_next", 2, {}, "need whole sequences"),
    ],
)
def test_a_model_whose_sequences_cannot_be_shared_is_refused(
    kind: str, size: int, hardware: dict[str, Any], why: str, team: Team, tmp_path: Path
) -> None:
    build(kind, tmp_path)
    for said in team(sequence_jobs.refusal, str(tmp_path), size, hardware):
        assert why in said and "sequence_parallel = 2" in said and "\n" not in said


def test_heads_that_cannot_be_divided_are_refused(team: Team, tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3}
    LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)).save_pretrained(tmp_path)
    for said in team(sequence_jobs.refusal, str(tmp_path), 2, {}):
        assert said.endswith("has 3 attention heads, which must be a multiple of it")
