"""Processes that divide layers among themselves compute what one process computes."""

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

pytestmark = pytest.mark.system

KINDS = ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "gemma2", "gpt_oss"]
"""Among them: norms of the divided heads, experts, latent attention, which is not divided, softcaps, windows, attention
whose last layer has a bias, so that only experts are divided."""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    started = Team(request.param)
    yield started
    started.dismiss()


def assert_equal(team: Team, folder: Path, hardware: dict[str, Any], float64: bool = False) -> None:
    """Pairs of processes divide layers; with four processes, FSDP shards each part among two."""
    sequence_jobs.assert_gradients_of_one_process(team, folder, 2, hardware, kind="tensor_parallel", float64=float64)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_process(kind: str, team: Team, tmp_path: Path) -> None:
    build(kind, tmp_path)
    assert_equal(team, tmp_path, {})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gemma2"])  # torch compiles its softcaps
def test_in_float64_they_differ_by_nothing_else_than_rounding(kind: str, team: Team, tmp_path: Path) -> None:
    build(kind, tmp_path)
    assert_equal(team, tmp_path, {}, float64=True)


@pytest.mark.parametrize("hardware", [{"gradient_checkpointing": True}, {"fused": False}], ids=str)
def test_with_other_settings(hardware: dict[str, Any], team: Team, tmp_path: Path) -> None:
    build("qwen3_moe", tmp_path)
    assert_equal(team, tmp_path, hardware)


def test_mixed_precision(team: Team, tmp_path: Path) -> None:
    """Without experts: in bfloat16 a router may choose others."""
    build("qwen2", tmp_path)
    expected, norm = sequence_jobs.mixed(ALONE, str(tmp_path), 1)
    for logprobs, divided in team(sequence_jobs.mixed, str(tmp_path), 2):
        assert 0 < np.abs(logprobs - expected).mean() < 0.02 and divided == pytest.approx(norm, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("qwen3_moe", {".q_proj": ((16, 32), 64), ".o_proj": ((32, 16), 64), ".experts": ((2, 32, 24), 32)}),
        ("deepseek_v3", {".o_proj": ((32, 48), 32), "mlp.gate_proj": ((24, 32), 64), ".experts": ((2, 32, 24), 32)}),
    ],
)
def test_a_process_computes_with_its_part_of_weights_and_all_tokens(
    kind: str, parts: dict[str, tuple[tuple[int, ...], int]], team: Team, tmp_path: Path
) -> None:
    """Half of 32 or 48 columns or rows, two of four experts; 63 tokens, as in test_sequence_parallel.py, and a pad.
    Experts gather tokens themselves. Latent attention is not divided."""
    build(kind, tmp_path)
    for used in team(sequence_jobs.weights_used, str(tmp_path), [*parts]):
        assert used == parts


def refusals(team: Team, folder: Path, hardware: dict[str, Any]) -> list[str]:
    return team(sequence_jobs.refusal, str(folder), 2, hardware, "tensor_parallel")


def test_a_model_that_transformers_cannot_divide_is_refused(team: Team, tmp_path: Path) -> None:
    build("gpt2", tmp_path)
    for said in refusals(team, tmp_path, {}):
        assert said.startswith("hardware.tensor_parallel = 2: transformers has no plan to divide") and "\n" not in said


def test_a_model_that_counts_positions_itself_is_refused(team: Team, tmp_path: Path) -> None:
    build("llama4_text", tmp_path)
    for said in refusals(team, tmp_path, {}):
        assert "Llama4TextAttention of" in said and "count positions themselves" in said and "\n" not in said


def test_heads_that_cannot_be_divided_are_refused(team: Team, tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 63, "num_hidden_layers": 2, "num_attention_heads": 3}
    LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)).save_pretrained(tmp_path)
    for said in refusals(team, tmp_path, {}):
        assert said.endswith("has 3 attention heads, which must be a multiple of it")


def test_a_plan_that_does_not_fit_the_model_is_noticed(team: Team, tmp_path: Path) -> None:
    build("llama", tmp_path)
    for said in team(sequence_jobs.refusal_with_a_wrong_plan, str(tmp_path)):
        assert "computes other log-probabilities with its layers divided" in said and "\n" not in said
