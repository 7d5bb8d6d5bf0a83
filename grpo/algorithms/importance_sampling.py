"""Correction for samples from a policy that differs from the trained one because of other kernels or older weights."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from grpo.algorithms.objectives import measured_mean
from grpo.algorithms.tokens import Normalizers, Tokens


def correct_for_sampler(
    tokens: Tokens, sampler_logprobs: Tensor, ratio_max: float, normalizers: Normalizers
) -> tuple[Tokens, dict[str, Tensor]]:
    """Multiplies each token's advantage by min(pi_old / pi_sampler, ratio_max): truncated importance sampling; with
    older sampler weights this is AReaL's decoupled objective (arXiv 2505.24298).

    pi_old is the policy before the updates on these samples. The objective's clip bounds how far the updates move from
    pi_old; this weight turns an expectation under the sampler into one under pi_old, up to the truncation. It applies
    to the advantages because every objective is linear in them as long as their sign is kept.

    Shapes are [B, T]. Statistics: the mean and the maximum over tokens of |log pi_old - log pi_sampler|, nats, and the
    share of tokens whose weight was truncated.
    """
    difference = (tokens.old_logprobs - sampler_logprobs) * tokens.mask
    ratio = difference.exp()
    stats = {
        "sampler_difference": measured_mean(difference.abs(), tokens.mask, normalizers),
        "sampler_difference_max": difference.abs().max(),
        "sampler_truncated": measured_mean((ratio > ratio_max).float(), tokens.mask, normalizers),
    }
    return replace(tokens, advantages=tokens.advantages * ratio.clamp(max=ratio_max)), stats
