"""Policy objectives: what an update maximises, given advantages.

Each combines four functions: an importance ratio, an objective per token, a mean over tokens, and a KL penalty per
token or per sequence. Sources: GRPO, DeepSeekMath (DSM) eq. 3 and 21, and R1 (arXiv 2501.12948) eq. 1; DAPO,
2503.14476; Dr. GRPO,
2503.20783; GSPO, 2507.18071; CISPO, MiniMax-M1, 2506.13585; BNPO's mean as in TRL. docs/objectives.md says how
they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo.algorithms.kl import KL, Estimator
from grpo.algorithms.tokens import Normalizers, Tokens
from grpo.errors import InputError

LOG_RATIO_MAX = 20.0
"""Nats. Ratios of whole sequences are products of thousands of factors and would overflow. They are limited to e^20,
with the gradient for that value."""


class TokenObjective(NamedTuple):
    """The value to maximise, [B, T], and the tokens (bool, [B, T]) on which a clip took effect."""

    value: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


# Ratios: Tokens -> [B, T].


def token_ratio(tokens: Tokens) -> Tensor:
    """rho_t = pi/pi_old of each token."""
    return (tokens.logprobs - tokens.old_logprobs).exp()


def on_policy_ratio(tokens: Tokens) -> Tensor:
    """pi/sg(pi): value 1, gradient of log pi; for a single update on samples of the current policy (DSM eq. 21).
    `old_logprobs` is ignored."""
    return (tokens.logprobs - tokens.logprobs.detach()).exp()


def sequence_ratio(tokens: Tokens) -> Tensor:
    """s_i = exp(mean_t log rho_t), constant over a sequence (GSPO eq. 7)."""
    log_ratio = (tokens.logprobs - tokens.old_logprobs) * tokens.mask
    mean = log_ratio.sum(1, keepdim=True) / tokens.mask.sum(1, keepdim=True).clamp(min=1)
    return mean.exp().expand_as(tokens.mask)


def sequence_ratio_per_token(tokens: Tokens) -> Tensor:
    """sg(s_i) pi/sg(pi): the value of s_i, with a separate gradient for each token (GSPO-token, eq. 14)."""
    return sequence_ratio(tokens).detach() * on_policy_ratio(tokens)


def sequence_product_ratio(tokens: Tokens) -> Tensor:
    """pi(o)/pi_old(o), the product of the tokens' ratios, constant over a sequence (R1 eq. 1). At most e^20."""
    log_ratio = ((tokens.logprobs - tokens.old_logprobs) * tokens.mask).sum(1, keepdim=True)
    return _held(log_ratio).exp().expand_as(tokens.mask)


def _held(log_ratio: Tensor) -> Tensor:
    """Limits the value to LOG_RATIO_MAX and keeps the gradient."""
    return log_ratio - (log_ratio.detach() - LOG_RATIO_MAX).clamp(min=0)


# Objectives per token: (ratio, Tokens, clip_eps_low, clip_eps_high) -> TokenObjective.


def clipped_surrogate(ratio: Tensor, tokens: Tokens, low: float, high: float) -> TokenObjective:
    """min(rho A, clip(rho, 1 - low, 1 + high) A) (PPO; DSM eq. 3). A clip takes effect where it stops the
    gradient: the lower one for A < 0, the upper one for A > 0. With R1's eps = 10 only the upper one can, because a
    ratio is never below 1 - 10."""
    advantages = tokens.advantages
    value = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return TokenObjective(value, (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0))


def unclipped(ratio: Tensor, tokens: Tokens, low: float, high: float) -> TokenObjective:
    """rho A, without a clip (DSM eq. 21)."""
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenObjective(ratio * tokens.advantages, never, never)


def clipped_weight(ratio: Tensor, tokens: Tokens, low: float, high: float) -> TokenObjective:
    """sg(clip(rho, 1 - low, 1 + high)) A log pi (CISPO eq. 4-5): the clip bounds a weight, and every token keeps
    its gradient. A clip takes effect where it changes the weight, whatever the sign of A.

    The paper has no lower bound; clip_eps_low >= 1 removes it here. TRL clamps at `epsilon_high` itself, so its 5.0
    corresponds to clip_eps_high = 4.0 here.
    """
    weight = ratio.clamp(1 - low, 1 + high).detach()
    return TokenObjective(weight * tokens.advantages * tokens.logprobs, ratio < 1 - low, ratio > 1 + high)


def log_likelihood(ratio: Tensor, tokens: Tokens, low: float, high: float) -> TokenObjective:
    """A log pi, without ratio or clip. A = 1 for correct answers and 0 for others gives (online) rejection-sampling
    fine-tuning; A = 1 everywhere gives SFT (DSM A.1.1-A.1.3)."""
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenObjective(tokens.advantages * tokens.logprobs, never, never)


# Means: ([B, T], mask, Normalizers) -> this micro-batch's part of the step's mean.


def sequence_mean(x: Tensor, mask: Tensor, normalizers: Normalizers) -> Tensor:
    """Mean over sequences of the mean over their tokens (DSM eq. 3)."""
    return ((x * mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / normalizers.sequences


def token_mean(x: Tensor, mask: Tensor, normalizers: Normalizers) -> Tensor:
    """Mean over all tokens of the step (DAPO eq. 8)."""
    return (x * mask).sum() / normalizers.tokens


def measured_mean(x: Tensor, mask: Tensor, normalizers: Normalizers) -> Tensor:
    """Mean over the tokens of the step that are computed, for statistics."""
    return (x * mask).sum() / (normalizers.measured or normalizers.tokens)


def micro_batch_token_mean(x: Tensor, mask: Tensor, normalizers: Normalizers) -> Tensor:
    """Mean over the tokens of a micro-batch, weighted by its sequences (BNPO in TRL). The only mean here that depends
    on how a step is split into micro-batches."""
    return (x * mask).sum() / mask.sum().clamp(min=1) * (len(mask) / normalizers.sequences)


def constant_mean(x: Tensor, mask: Tensor, normalizers: Normalizers) -> Tensor:
    """Sum over tokens divided by a constant, so that every token has the same weight in sequences of any length (Dr.
    GRPO)."""
    return (x * mask).sum() / (normalizers.sequences * normalizers.budget)


# KL penalties: (Tokens, an estimator of KL, stale) -> [B, T]. `stale`: multiply by the ratio, for samples of an older
# policy (see grpo/algorithms/kl.py).


def token_kl(tokens: Tokens, estimate: Estimator, stale: bool) -> Tensor:
    """The estimate for each token (DSM eq. 4)."""
    assert tokens.ref_logprobs is not None
    kl = estimate(tokens.logprobs, tokens.ref_logprobs)
    return kl * token_ratio(tokens) if stale else kl


def sequence_kl(tokens: Tokens, estimate: Estimator, stale: bool) -> Tensor:
    """The estimate for x = pi_ref(o)/pi(o) of the whole sequence, constant over the sequence (R1 eq. 2). x is at most
    e^20."""
    assert tokens.ref_logprobs is not None
    log_x = _held(((tokens.ref_logprobs - tokens.logprobs) * tokens.mask).sum(1, keepdim=True))
    kl = estimate(-log_x, torch.zeros_like(log_x)).expand_as(tokens.mask)
    return kl * sequence_product_ratio(tokens) if stale else kl


RatioFunction = Callable[[Tokens], Tensor]
TokenObjectiveFunction = Callable[[Tensor, Tokens, float, float], TokenObjective]
Mean = Callable[[Tensor, Tensor, Normalizers], Tensor]
Penalty = Callable[[Tokens, Estimator, bool], Tensor]


class Form(NamedTuple):
    """The functions that make up an objective."""

    ratio: RatioFunction
    token_objective: TokenObjectiveFunction
    mean: Mean
    kl: Penalty = token_kl


OBJECTIVES: dict[str, Form] = {
    "grpo": Form(token_ratio, clipped_surrogate, sequence_mean),
    "grpo_sequence": Form(sequence_product_ratio, clipped_surrogate, sequence_mean, sequence_kl),
    "grpo_single_update": Form(on_policy_ratio, unclipped, sequence_mean),
    "dapo": Form(token_ratio, clipped_surrogate, token_mean),
    "bnpo": Form(token_ratio, clipped_surrogate, micro_batch_token_mean),
    "dr_grpo": Form(token_ratio, clipped_surrogate, constant_mean),
    "gspo": Form(sequence_ratio, clipped_surrogate, sequence_mean),
    "gspo_token": Form(sequence_ratio_per_token, clipped_surrogate, sequence_mean),
    "cispo": Form(token_ratio, clipped_weight, token_mean),
    "likelihood": Form(on_policy_ratio, log_likelihood, sequence_mean),
}


class Objective:
    """One of OBJECTIVES minus kl_coef times a KL estimate, both under the same mean (DSM eq. 3).

    `clip_eps_low`, `clip_eps_high`: the ratio is clipped to [1 - low, 1 + high]. `kl_estimator`: a name in KL.
    `kl_stale_correction`: multiply the estimate by the ratio, for samples of an older policy (see
    grpo/algorithms/kl.py). Raises InputError for an unknown name.
    """

    def __init__(
        self,
        name: str,
        *,
        clip_eps_low: float,
        clip_eps_high: float,
        kl_coef: float,
        kl_estimator: str,
        kl_stale_correction: bool,
    ):
        if name not in OBJECTIVES:
            raise InputError(f"objective: no {name!r} here; choose from {', '.join(OBJECTIVES)}")
        if kl_estimator not in KL:
            raise InputError(f"kl_estimator: no {kl_estimator!r} here; choose from {', '.join(KL)}")
        self.form = OBJECTIVES[name]
        self.clip_eps_low, self.clip_eps_high = clip_eps_low, clip_eps_high
        self.kl_coef, self.estimate_kl, self.kl_stale_correction = kl_coef, KL[kl_estimator], kl_stale_correction

    def __call__(self, tokens: Tokens, normalizers: Normalizers) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns -J, this micro-batch's part of the step's loss, and detached statistics.

        Statistics are sums over the micro-batch's tokens divided by the step's tokens, so those of a step add up:
        `clipped_low`, `clipped_high` (shares of tokens), `sampled_entropy` (-log pi, nats) and, with a reference, `kl`
        (the estimate per token, nats, for every kind of penalty). `ratio_min` and `ratio_max` combine by min and
        max.
        """
        assert tokens.ref_logprobs is not None or not self.kl_coef, (
            "a KL penalty needs the reference's log-probabilities"
        )
        tokens = tokens.without_padding()
        form = self.form
        ratio = form.ratio(tokens)
        objective = form.token_objective(ratio, tokens, self.clip_eps_low, self.clip_eps_high)
        value = objective.value
        per_token = {
            "clipped_low": objective.clipped_low,
            "clipped_high": objective.clipped_high,
            "sampled_entropy": -tokens.logprobs,
        }
        if tokens.ref_logprobs is not None:
            arguments = (tokens, self.estimate_kl, self.kl_stale_correction)
            per_token["kl"] = token_kl(*arguments)
            if self.kl_coef:  # 0 times an overflow would be nan
                kl = per_token["kl"] if form.kl is token_kl else form.kl(*arguments)
                value = value - self.kl_coef * kl
        stats = {name: measured_mean(x.detach(), tokens.mask, normalizers) for name, x in per_token.items()}
        padding = tokens.mask == 0
        stats["ratio_min"] = ratio.detach().masked_fill(padding, torch.inf).min()
        stats["ratio_max"] = ratio.detach().masked_fill(padding, -torch.inf).max()
        return -form.mean(value, tokens.mask, normalizers), stats
