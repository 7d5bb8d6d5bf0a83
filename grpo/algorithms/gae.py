"""PPO: rewards per token, generalized advantage estimation (GAE) and the value loss.

Sources: InstructGPT (2203.02155) for the KL penalty inside the reward, DSM eq. 1-2, Schulman et al. 2016 (1506.02438)
for GAE. PPO's policy objective is "grpo" or "dapo" of grpo/algorithms/objectives.py with these advantages and kl_coef =
0.

All tensors [B, T] over completion tokens, padded on the right, with mask 1.0 on tokens and 0.0 in the padding. A
completion truncated at the token budget is treated as ended: its outcome is on its last token, and the value after it
is 0. Bootstrapping from the value of the truncated state would reward text that is never written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo.algorithms.kl import k1
from grpo.algorithms.objectives import token_mean
from grpo.algorithms.tokens import Normalizers


def _next(x: Tensor) -> Tensor:
    """x shifted one token to the left, 0 after the last."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)


@torch.no_grad()
def token_rewards(
    outcome: Tensor, logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor, kl_coef: float
) -> Tensor:
    """-kl_coef log(pi/ref) on each token, plus the outcome [B] on the last one (DSM eq. 2). Returns [B, T].

    `logprobs` are under the policy that sampled. Without a reference there is no penalty.
    """
    rewards = (mask - _next(mask)) * outcome[:, None]  # 1 on each row's last token, nowhere in an empty row
    if ref_logprobs is None:
        return rewards
    return rewards - kl_coef * k1(logprobs, ref_logprobs).masked_fill(mask == 0, 0.0)


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, with V = 0 after the last token.

    `values[:, t]` is the value of the state before token t. Returns the advantages and the returns A + V, both [B, T]
    and 0 in the padding. With lam = 1 and gamma = 1 the return is the sum of the rewards from t on.
    """
    rewards, values = (x.masked_fill(mask == 0, 0.0) for x in (rewards, values))
    delta = rewards + gamma * _next(values) - values
    advantages = torch.zeros_like(delta)
    following = torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        following = delta[:, t] + gamma * lam * following
        advantages[:, t] = following
    return advantages, advantages + values


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Scales to mean 0 and population std 1 over all tokens of the rollout, [B, T] -> [B, T]; 0 in the padding, and
    everywhere if all advantages are equal.

    Expects a whole rollout: on micro-batches the result would depend on how they are split.
    """
    tokens = mask.sum().clamp(min=1)
    centered = (advantages - (advantages * mask).sum() / tokens) * mask
    std = (centered.square().sum() / tokens).sqrt()
    return torch.where(std > 1e-6, centered / std, torch.zeros_like(centered))


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float, normalizers: Normalizers
) -> Tensor:
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), this micro-batch's part of the mean over the step's
    tokens. `old_values` are the values from which `returns` were computed. A value that moved towards its return by
    more than `clip` has no gradient."""
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    error = torch.maximum((values - returns).square(), (clipped - returns).square())
    return token_mean(0.5 * error.masked_fill(mask == 0, 0.0), mask, normalizers)
