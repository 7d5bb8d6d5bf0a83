"""The plain reference of GRPO learns, and the trainer's fast path has its loss and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo.config.rl import RL
from grpo.distributed.process_group import Parallel
from grpo.rl.batch import Rollout
from grpo.rl.method_table import METHODS
from grpo.rl.model_set import Models
from grpo.rl.reference import Batch, GRPOSettings, Steps, grpo_loss, make_batch, sample, train
from grpo.rl.update import Update

SETTINGS = GRPOSettings(group_size=4, max_new_tokens=10, temperature=0.9, clip_eps=0.2, kl_coef=0.3)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
NOISE = 0.15
"""Standard deviation of old and reference log-probabilities around the policy's: about 1 ratio in 5 leaves 0.8..1.2."""
RELATIVE = 1e-4
"""Of the largest gradient: float32 sums in another order differ by some 1e-6, a wrong formula by 1e-2 or more."""


def outcome(prompt: list[int], completion: list[int]) -> float:
    return float(sum(completion) % 3)


def steps(prompt: list[int], completion: list[int]) -> Steps:
    """A step every three tokens, and one that ends with the completion."""
    ends = sorted({*range(2, len(completion), 3), len(completion) - 1})
    return [(end, float(completion[end] % 2)) for end in ends]


def reference_gradients(model, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = grpo_loss(model, batch, SETTINGS)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def fast_gradients(folder: str, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a whole update, as the trainer calls it, in several micro-batches."""
    settings = RL.model_validate(
        {
            "steps": 1,
            "prompts_per_step": len(PROMPTS),
            "group_size": SETTINGS.group_size,
            "sampling": {"max_new_tokens": SETTINGS.max_new_tokens, "temperature": SETTINGS.temperature},
            "clip_eps_low": SETTINGS.clip_eps,
            "clip_eps_high": SETTINGS.clip_eps,
            "kl_coef": SETTINGS.kl_coef,
            "micro_batch_tokens": 64,
            "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 1e30},  # a norm that never clips
            "hardware": {"device": "cpu"},
        }
    )
    parallel, method = Parallel.start(settings.hardware), METHODS["grpo"]
    models = Models(folder, settings, method, parallel)
    update = Update(settings, method, models, parallel)
    gradients: dict[str, Tensor] = {}
    update.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({name: p.grad.clone() for name, p in models.policy.model.named_parameters()})
    )
    lengths = [len(completion) for completion in batch.completions]

    def rows(table: Tensor) -> list[Tensor]:
        return [row[:length] for row, length in zip(table, lengths, strict=True)]

    rollout = Rollout(
        prompts=batch.prompts,
        completions=batch.completions,
        advantages=rows(batch.advantages),
        old_logprobs=rows(batch.old_logprobs),
        ref_logprobs=rows(batch.ref_logprobs),
        old_values=None,
        returns=None,
        learnt=[True] * len(lengths),
        units=[[i] for i in range(len(lengths))],
        metrics={},
    )
    return update(rollout, range(len(lengths)), 0)["loss"], gradients


@pytest.mark.parametrize("reward", [outcome, steps], ids=["outcome", "process"])
def test_the_fast_path_has_the_loss_and_gradients_of_the_reference(model_folder, reward):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    torch.manual_seed(0)
    batch = make_batch(model, model, PROMPTS, reward, SETTINGS)
    old, reference = (batch.old_logprobs + NOISE * torch.randn(batch.old_logprobs.shape) for _ in range(2))
    batch = replace(batch, old_logprobs=old, ref_logprobs=reference)
    assert (batch.advantages > 0).any() and (batch.advantages < 0).any()
    loss, gradients = reference_gradients(model, batch)
    fast_loss, fast = fast_gradients(model_folder, batch)
    assert fast_loss == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert fast.keys() == gradients.keys()
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    assert largest > 1e-3
    for name, gradient in gradients.items():
        torch.testing.assert_close(fast[name], gradient, rtol=0, atol=RELATIVE * largest, msg=name)


def test_a_completion_ends_with_its_end_token(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    eos = model.generation_config.eos_token_id
    torch.manual_seed(0)
    completions = sample(model, PROMPTS[0], replace(SETTINGS, group_size=64, max_new_tokens=40))
    assert all(eos not in completion[:-1] for completion in completions)
    assert all(len(completion) == 40 or completion[-1] == eos for completion in completions)


@pytest.mark.system
@pytest.mark.parametrize("process", [False, True], ids=["outcome", "process"])
def test_training_raises_the_reward(model_folder, process):
    """The task: completions of tokens with even ids. About half of a random policy's tokens are."""

    def reward(prompt: list[int], completion: list[int]) -> float | Steps:
        even = [float(token % 2 == 0) for token in completion]
        return list(enumerate(even)) if process else sum(even) / len(even)

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    torch.manual_seed(0)
    settings = GRPOSettings(group_size=16, max_new_tokens=4, updates=2, learning_rate=3e-3)
    rewards = train(model, PROMPTS, reward, 15, settings)
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert last > first + 0.2 * (4 if process else 1)
