"""Optimizer steps of several processes, in each way of dividing a model, are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.tiny_models import build
from grpo.config.common import Hardware
from grpo.distributed.fsdp import stored_tensors
from grpo.model.loading import load_policy
from tests.support.parallel_jobs import ALONE, Team
from tests.support.sequence_jobs import two_steps

pytestmark = pytest.mark.system

WAYS = {"fsdp": {}, "sequence": {"sequence_parallel": 2}, "tensor": {"tensor_parallel": 2}}
RATE = 1e-3


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    """With four processes, pairs share tokens or layers, and FSDP shards each part among two."""
    started = Team(request.param)
    yield started
    started.dismiss()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("way", WAYS)
def test_two_steps_a_file_and_another_number_of_processes(kind: str, way: str, team: Team, tmp_path: Path) -> None:
    """Weights after two AdamW steps with clipping, of which the second starts from a checkpoint of the first; then one
    process, or an undivided model in each, goes on from that, and the saved model opens."""
    model, state = str(tmp_path / "model"), str(tmp_path / "state")
    build(kind, tmp_path / "model")
    expected, norms = two_steps(ALONE, model, str(tmp_path / "alone"), RATE, {})
    assert all(norm > 1 for norm in norms)  # so they are clipped
    found = team(two_steps, model, state, RATE, WAYS[way])
    opened = dict(stored_tensors(load_policy(f"{state}/model", Hardware(device="cpu"))))
    assert opened.keys() == expected.keys()
    for name, weight in found[0][0].items():
        np.testing.assert_array_equal(opened[name].detach().numpy(), weight, err_msg=name)
    found += [*team(two_steps, model, state, RATE, {}), two_steps(ALONE, model, state, RATE, {})]
    for weights, same in found:
        np.testing.assert_allclose(same, norms[: len(same)], rtol=1e-5)
        assert weights.keys() == expected.keys()
        differences = np.concatenate([np.abs(weights[name] - weight).ravel() for name, weight in expected.items()])
        # Adam moves each weight by about the rate, also those whose gradient is hardly more than rounding.
        assert differences.mean() < 1e-4 * RATE and (differences > 0.01 * RATE).mean() < 1e-3
