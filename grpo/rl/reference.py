"""GRPO in plain PyTorch, from prompts to the optimizer step: Algorithm 1 of DeepSeekMath (DSM, arXiv 2402.03300).

    reference <- policy
    for each step:
        old policy <- policy
        sample G completions for each prompt, score them, compute advantages (4.1.2 outcome, 4.1.3 process supervision)
        for each update on this batch: ascend the GRPO objective (eq. 3) with AdamW

The trainer (`grpo.rl.trainer`) does the same with packed sequences, fused kernels, engines and checkpoints. Read this
module first. `tests/grpo/rl/test_reference.py` compares the trainer's loss and gradients with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.algorithms.advantages import ADVANTAGES, process_advantages
from grpo.algorithms.objectives import Objective
from grpo.algorithms.tokens import Normalizers, Tokens, pad

Steps = list[tuple[int, float]]
"""(index of the completion token that ends a reasoning step, reward of the step), one entry per step."""
RewardFunction = Callable[[list[int], list[int]], float | Steps]
"""(prompt, completion), as token ids -> the completion's reward or, under process supervision, its steps' rewards."""


@dataclass(frozen=True)
class GRPOSettings:
    """Hyperparameters, named as in section 4 of DSM where it names them. Defaults are those of `grpo.config.rl.RL`."""

    group_size: int = 16  # G
    max_new_tokens: int = 64
    temperature: float = 1.0
    updates: int = 1  # mu, per batch
    clip_eps: float = 0.2
    kl_coef: float = 0.001  # beta
    learning_rate: float = 1e-6
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Batch:
    """G completions of each of P prompts (B = P * G rows) and the inputs of the objective, [B, T]."""

    prompts: list[list[int]]  # each prompt repeated G times
    completions: list[list[int]]
    rewards: Tensor  # [P, G]; a completion's step rewards are summed here
    advantages: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor


def train(
    policy: PreTrainedModel, prompts: Sequence[list[int]], reward: RewardFunction, steps: int, settings: GRPOSettings
) -> list[float]:
    """Trains `policy` in place; each step uses all prompts. Returns the mean reward of each step."""
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    mean_rewards = []
    for _ in range(steps):
        batch = make_batch(policy, reference, prompts, reward, settings)
        for _ in range(settings.updates):
            loss = grpo_loss(policy, batch, settings)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        mean_rewards.append(batch.rewards.mean().item())
    return mean_rewards


@torch.no_grad()
def make_batch(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    prompts: Sequence[list[int]],
    reward: RewardFunction,
    settings: GRPOSettings,
) -> Batch:
    """Samples G completions of each prompt from the policy (the updates' old policy) and scores them."""
    sampled = [(prompt, completion) for prompt in prompts for completion in sample(policy, prompt, settings)]
    repeated, completions = [list(rows) for rows in zip(*sampled, strict=True)]
    scores = [reward(prompt, completion) for prompt, completion in sampled]
    totals = [score if isinstance(score, (int, float)) else sum(value for _, value in score) for score in scores]
    rewards = torch.tensor(totals, dtype=torch.float32).view(len(prompts), settings.group_size)
    return Batch(
        prompts=repeated,
        completions=completions,
        rewards=rewards,
        advantages=advantages_of(scores, rewards, completions),
        old_logprobs=logprobs_of(policy, repeated, completions, settings.temperature),
        ref_logprobs=logprobs_of(reference, repeated, completions, settings.temperature),
    )


def sample(policy: PreTrainedModel, prompt: list[int], settings: GRPOSettings) -> list[list[int]]:
    """G completions of one prompt, o_i ~ pi_old(. | q), each up to its end token."""
    eos = policy.generation_config.eos_token_id
    ids = torch.tensor([prompt] * settings.group_size, device=policy.device)
    options: dict[str, Any] = dict(do_sample=True, temperature=settings.temperature, top_k=0, top_p=1.0)
    output = policy.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=settings.max_new_tokens, pad_token_id=eos, **options
    )
    rows = output[:, len(prompt) :].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


def advantages_of(scores: Sequence[float | Steps], rewards: Tensor, completions: Sequence[list[int]]) -> Tensor:
    """A_it, [B, T]: (r_i - mean) / std of the group on all tokens of completion i (DSM 4.1.2) or, from step rewards,
    the sum of the normalized rewards of the steps that end at token t or later (DSM 4.1.3)."""
    lengths, size = [len(completion) for completion in completions], rewards.shape[1]
    rows: list[Tensor] = []
    for start, outcome in zip(range(0, len(scores), size), ADVANTAGES["grpo"](rewards, "population"), strict=True):
        steps, of_group = (
            [s for s in scores[start : start + size] if isinstance(s, list)],
            lengths[start : start + size],
        )
        if steps:
            step_rewards, ends = [[r for _, r in s] for s in steps], [[end for end, _ in s] for s in steps]
            rows += process_advantages(step_rewards, ends, of_group, "population")
        else:
            rows += [advantage.expand(length) for advantage, length in zip(outcome, of_group, strict=True)]
    return pad([row[:length] for row, length in zip(rows, lengths, strict=True)], torch.device("cpu"))


def logprobs_of(
    model: Any, prompts: Sequence[list[int]], completions: Sequence[list[int]], temperature: float
) -> Tensor:
    """log pi(o_t | q, o_<t) of every completion token, [B, T], with one forward pass per sequence."""
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = model(torch.tensor([prompt + completion], device=model.device)).logits[0, len(prompt) - 1 : -1]
        targets = torch.tensor(completion, device=model.device)
        rows.append((logits.float() / temperature).log_softmax(1).gather(1, targets[:, None]).squeeze(1))
    return pad(rows, model.device)


def grpo_loss(policy: Any, batch: Batch, settings: GRPOSettings) -> Tensor:
    """-J_GRPO (DSM eq. 3): the clipped surrogate minus kl_coef times the k3 estimate of the KL to the reference (eq.
    4), mean over the tokens of each completion, then over completions."""
    objective = Objective(
        "grpo",
        clip_eps_low=settings.clip_eps,
        clip_eps_high=settings.clip_eps,
        kl_coef=settings.kl_coef,
        kl_estimator="k3",
        kl_stale_correction=False,
    )
    lengths = [len(completion) for completion in batch.completions]
    tokens = Tokens(
        logprobs=logprobs_of(policy, batch.prompts, batch.completions, settings.temperature),
        old_logprobs=batch.old_logprobs,
        ref_logprobs=batch.ref_logprobs,
        advantages=batch.advantages.to(policy.device),
        mask=pad([torch.ones(length) for length in lengths], policy.device),
    )
    loss, _ = objective(tokens, Normalizers(len(lengths), sum(lengths), settings.max_new_tokens))
    return loss
