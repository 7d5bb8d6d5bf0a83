"""Samples of a policy that is not quite the one that learns from them: another kernel's, or weights that are older."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from grpo.algorithms.objectives import Scale, Tokens, token_mean


def correct_for_sampler(
    tokens: Tokens, sampler_logprobs: Tensor, ratio_max: float, scale: Scale
) -> tuple[Tokens, dict[str, Tensor]]:
    """Advantages weighted by min(pi_old / pi_sampler, ratio_max) of each token, and how much the two differ.

    pi_old is the policy before the updates on these samples: the clip of the objective bounds what the updates do, this
    weight corrects whose samples they are (truncated importance sampling; AReaL's decoupled objective, arXiv
    2505.24298, when the sampler's weights are older). An expectation under the sampler becomes one under pi_old, up to
    the truncation. Every objective is linear in advantages that keep their sign, so the weight goes there.

    Shapes [B, T]. Statistics: the mean and the largest |log pi_old - log pi_sampler| of a token, nats, and the share
    of tokens whose weight was truncated.
    """
    difference = (tokens.old_logprobs - sampler_logprobs) * tokens.mask
    ratio = difference.exp()
    stats = {
        "sampler_difference": token_mean(difference.abs(), tokens.mask, scale),
        "sampler_difference_max": difference.abs().max(),
        "sampler_truncated": token_mean((ratio > ratio_max).float(), tokens.mask, scale),
    }
    return replace(tokens, advantages=tokens.advantages * ratio.clamp(max=ratio_max)), stats
