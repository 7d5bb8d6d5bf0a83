"""The GRPO objective (DSM eq. 3) on tensors: no model, no logging."""

from __future__ import annotations

import torch
from torch import Tensor


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, non-negative estimate of KL(policy || reference) per token (DSM eq. 4): x - log x - 1, x = ref/policy.

    Any shape; both arguments alike.
    """
    log_x = ref_logprobs - logprobs
    return log_x.exp() - log_x - 1


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip_eps_low: float, clip_eps_high: float) -> Tensor:
    """min(rho A, clip(rho, 1 - low, 1 + high) A), to be maximised. `ratio` is [B, T], `advantage` [B, 1] or [B, T]."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantage)


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    kl_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-J of DSM eq. 3, summed over sequences (the caller divides by their number in the whole batch).

    logprobs, old_logprobs, ref_logprobs, mask: [B, T] over completion tokens; advantages: [B]. Each sequence counts
    by the mean over its own tokens. Returns the loss and, for logging, sums over sequences of per-sequence means.
    """
    advantage = advantages[:, None]
    ratio = (logprobs - old_logprobs).exp()
    gain = clipped_surrogate(ratio, advantage, clip_eps_low, clip_eps_high)
    outside = ((ratio > 1 + clip_eps_high) & (advantage > 0)) | ((ratio < 1 - clip_eps_low) & (advantage < 0))

    def mean_over_tokens(x: Tensor) -> Tensor:
        return (x * mask).sum(1) / mask.sum(1).clamp(min=1)

    stats = {"clipped_share": mean_over_tokens(outside.float()).sum().detach()}
    if ref_logprobs is not None:
        penalty = k3(logprobs, ref_logprobs)
        gain = gain - kl_coef * penalty
        stats["kl"] = mean_over_tokens(penalty).sum().detach()
    return -mean_over_tokens(gain).sum(), stats
