"""The loss and the backward pass of a micro-batch never wait for the device that the model is on.

PyTorch's meta device stands in for a GPU: its tensors have shapes but no numbers, so reading one raises, and so does
most arithmetic with a host tensor. Our CPU kernels do not apply there, so this runs what a GPU runs. Plain models are
left out: transformers reads positions back to see whether they are packed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo.algorithms.tokens import Normalizers
from grpo.config.rl import RL
from grpo.distributed.process_group import Parallel
from grpo.rl.batch import Rollout
from grpo.rl.method_table import METHODS
from grpo.rl.model_set import Models
from grpo.rl.update import Update
from grpo.training.totals import Totals
from tests.support.device_waits import CAUSAL_BIAS, DeviceWaits, causal_mask

STAND_IN = Parallel.alone(torch.device("meta"))
PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
COMPLETIONS = [[10, 11], [12, 13, 14], [10, 12], [13, 11, 10]]


def rollout() -> Rollout:
    vectors = [torch.linspace(-1, 1, len(completion)) for completion in COMPLETIONS]
    return Rollout(
        prompts=PROMPTS,
        completions=COMPLETIONS,
        advantages=vectors,
        old_logprobs=vectors,
        ref_logprobs=vectors,
        old_values=vectors,
        returns=vectors,
        learnt=[True] * 4,
        units=[[0, 1], [2, 3]],
        metrics={},
        sampler_logprobs=vectors,
    )


def update_of(folder: str, method: str, **hardware: Any) -> Update:
    settings = RL.model_validate(
        {
            "steps": 1,
            "method": method,
            "kl_coef": 0.001,
            "sampling": {"max_new_tokens": 8},
            "optimizer": {"learning_rate": 1e-3},
            "hardware": {"device": "cpu", **hardware},
        }
    )
    models = Models(folder, settings, METHODS[method], STAND_IN)
    return Update(settings, METHODS[method], models, STAND_IN)


@pytest.mark.parametrize("method", ["grpo", "ppo", "dpo"])
@pytest.mark.parametrize(
    "hardware",
    [{}, {"fused": False}, {"gradient_checkpointing": True}],
    ids=["packed", "unfused", "checkpointing"],
)
def test_a_micro_batch(model_folder: str, method: str, hardware: dict[str, Any]) -> None:
    update, totals = update_of(model_folder, method, **hardware), Totals()
    update.models.policy.train()
    for rows in ([0, 1, 2, 3], [0, 1]):
        loss, measured = update.loss(rollout(), rows, Normalizers(sequences=4, tokens=10, budget=8))
        loss.backward()
        totals.add({"loss": loss, **measured})
    gradients = [parameter.grad for parameter in update.models.policy.parameters()]
    assert gradients and all(gradient is not None and gradient.is_meta for gradient in gradients)
    with pytest.raises((NotImplementedError, RuntimeError)):  # what a wait would look like
        totals.read()


@pytest.mark.parametrize(("method", "waits"), [("grpo", 2), ("dpo", 2), ("ppo", 3)])
def test_an_update_waits_for_its_metrics_and_for_each_gradient_norm(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, method: str, waits: int
) -> None:
    """However many micro-batches it has. What is read decides whether the optimizer steps. PPO clips two models."""
    update = update_of(model_folder, method)
    monkeypatch.setattr(CAUSAL_BIAS, causal_mask)
    update.settings = update.settings.model_copy(update={"micro_batch_tokens": 8})  # two micro-batches
    monkeypatch.setattr(update.optimizer, "step", lambda: None)  # fused AdamW has no kernel for the meta device
    with DeviceWaits() as found:
        update(rollout(), [0, 1], 0)
    assert len(found.found) == waits, found.found
    assert [shape for _, shape in found.found[1:]] == [()] * (waits - 1)
