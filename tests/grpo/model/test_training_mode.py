"""A model computes the same in training mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.tiny_models import build
from grpo.config.common import Hardware, Lora
from grpo.model.loading import load_policy
from grpo.model.logprobs import completion_logprobs


@pytest.mark.parametrize("lora", [None, Lora(rank=2, alpha=4)])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "opt"])  # with dropout of 0.1 in modules, and in a layer's own code
def test_dropout_stays_off(kind: str, checkpointing: bool, lora: Lora | None, tmp_path: Path) -> None:
    build(kind, tmp_path)
    policy = load_policy(str(tmp_path), Hardware(device="cpu", gradient_checkpointing=checkpointing), lora)
    assert any(isinstance(module, nn.Dropout) and module.p for module in policy.modules()) or kind == "opt"
    runs = []
    for mode in (False, True):
        policy.train(mode)
        runs.append(completion_logprobs(policy, [[5, 6, 7]], [[8, 9, 10, 11]], 1.0))
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=1e-6)


def test_activations_are_recomputed_all_the_same(tmp_path: Path) -> None:
    build("gpt2", tmp_path)
    calls = []
    for checkpointing in (False, True):
        policy = load_policy(str(tmp_path), Hardware(device="cpu", gradient_checkpointing=checkpointing)).train()
        count: list[int] = []
        policy.transformer.h[0].mlp.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        completion_logprobs(policy, [[5, 6, 7]], [[8, 9, 10, 11]], 1.0).sum().backward()
        calls.append(len(count))
    assert calls == [1, 2]
