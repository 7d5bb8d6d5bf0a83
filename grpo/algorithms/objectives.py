"""Objectives on tensors, no model and no logging: what an update maximises, given advantages.

Each is a choice of three small functions: which ratio, which gain per token, which mean over tokens. Sources: GRPO,
DeepSeekMath (DSM) eq. 3 and 21; DAPO, arXiv 2503.14476; Dr. GRPO, 2503.20783; GSPO, 2507.18071; CISPO, MiniMax-M1,
2506.13585; BNPO's mean as TRL has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grpo.algorithms.kl import KL
from grpo.errors import InputError


@dataclass(frozen=True)
class Tokens:
    """Completion tokens of a micro-batch, all [B, T], padded on the right."""

    logprobs: Tensor  # of the policy, with gradient
    old_logprobs: Tensor  # of the policy that sampled
    ref_logprobs: Tensor | None
    advantages: Tensor  # the same on all tokens of a completion under outcome supervision
    mask: Tensor  # 1.0 on completion tokens, else 0.0

    def without_padding(self) -> Tokens:
        """With zeros where the mask is 0, so that nothing there, not even an inf, reaches a loss or a gradient."""
        padding = self.mask == 0
        return Tokens(
            logprobs=self.logprobs.masked_fill(padding, 0.0),
            old_logprobs=self.old_logprobs.masked_fill(padding, 0.0),
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs.masked_fill(padding, 0.0),
            advantages=self.advantages.masked_fill(padding, 0.0),
            mask=self.mask,
        )


@dataclass(frozen=True)
class Scale:
    """Denominators of a whole optimizer step: a micro-batch is a part of one, and the parts of a loss add up."""

    sequences: int
    tokens: int  # completion tokens
    budget: int  # tokens that the longest completion may have


class Gain(NamedTuple):
    """What to maximise, [B, T], and the tokens (bool, [B, T]) on which a clip took effect."""

    value: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


# Ratios: Tokens -> [B, T].


def token_ratio(tokens: Tokens) -> Tensor:
    """rho_t = pi/pi_old of each token."""
    return (tokens.logprobs - tokens.old_logprobs).exp()


def on_policy_ratio(tokens: Tokens) -> Tensor:
    """pi/sg(pi): 1, with the gradient of log pi. Right for the one update on samples of the policy itself (DSM eq. 21);
    the sampler's log-probabilities are not read."""
    return (tokens.logprobs - tokens.logprobs.detach()).exp()


def sequence_ratio(tokens: Tokens) -> Tensor:
    """s_i = exp(mean_t log rho_t), the same on all tokens of a sequence (GSPO eq. 7)."""
    log_ratio = (tokens.logprobs - tokens.old_logprobs) * tokens.mask
    mean = log_ratio.sum(1, keepdim=True) / tokens.mask.sum(1, keepdim=True).clamp(min=1)
    return mean.exp().expand_as(tokens.mask)


def sequence_ratio_per_token(tokens: Tokens) -> Tensor:
    """sg(s_i) pi/sg(pi): the value of s_i, the gradient of each token by itself (GSPO-token, eq. 14)."""
    return sequence_ratio(tokens).detach() * on_policy_ratio(tokens)


# Gains: (ratio, Tokens, clip_eps_low, clip_eps_high) -> Gain.


def clipped_surrogate(ratio: Tensor, tokens: Tokens, low: float, high: float) -> Gain:
    """min(rho A, clip(rho, 1 - low, 1 + high) A). A clip takes effect where it stops the gradient: below for A < 0,
    above for A > 0. With R1's eps = 10 only the upper one can: a ratio never falls below 1 - 10."""
    advantages = tokens.advantages
    value = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return Gain(value, (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0))


def unclipped(ratio: Tensor, tokens: Tokens, low: float, high: float) -> Gain:
    """rho A; the clip is not read."""
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return Gain(ratio * tokens.advantages, never, never)


def clipped_weight(ratio: Tensor, tokens: Tokens, low: float, high: float) -> Gain:
    """sg(clip(rho, 1 - low, 1 + high)) A log pi (CISPO eq. 4-5): the clip bounds a token's weight, and no token loses
    its gradient; the clips count where they change the weight, whatever the sign of A.

    The paper has no lower bound: clip_eps_low >= 1 gives that. TRL clamps at `epsilon_high` itself, so its 5.0 is
    clip_eps_high = 4.0 here.
    """
    weight = ratio.clamp(1 - low, 1 + high).detach()
    return Gain(weight * tokens.advantages * tokens.logprobs, ratio < 1 - low, ratio > 1 + high)


def log_likelihood(ratio: Tensor, tokens: Tokens, low: float, high: float) -> Gain:
    """A log pi; neither ratio nor clip is read. With A = 1 where the answer is correct, else 0: (online) rejection
    sampling fine-tuning; with A = 1 everywhere: SFT (DSM A.1.1-A.1.3)."""
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return Gain(tokens.advantages * tokens.logprobs, never, never)


# Means: ([B, T], mask, Scale) -> this micro-batch's part of the step's mean.


def sequence_mean(x: Tensor, mask: Tensor, scale: Scale) -> Tensor:
    """Each sequence counts by the mean over its own tokens (DSM eq. 3)."""
    return ((x * mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / scale.sequences


def token_mean(x: Tensor, mask: Tensor, scale: Scale) -> Tensor:
    """Each token of the step counts alike (DAPO eq. 8)."""
    return (x * mask).sum() / scale.tokens


def micro_batch_token_mean(x: Tensor, mask: Tensor, scale: Scale) -> Tensor:
    """Each token of a micro-batch counts alike, each micro-batch by its sequences: the one mean here that depends on
    how a step is cut into micro-batches."""
    return (x * mask).sum() / mask.sum().clamp(min=1) * (len(mask) / scale.sequences)


def budget_mean(x: Tensor, mask: Tensor, scale: Scale) -> Tensor:
    """The sum over tokens by a constant, so that length weighs neither for nor against a sequence (Dr. GRPO)."""
    return (x * mask).sum() / (scale.sequences * scale.budget)


RatioForm = Callable[[Tokens], Tensor]
GainForm = Callable[[Tensor, Tokens, float, float], Gain]
Mean = Callable[[Tensor, Tensor, Scale], Tensor]

OBJECTIVES: dict[str, tuple[RatioForm, GainForm, Mean]] = {
    "grpo": (token_ratio, clipped_surrogate, sequence_mean),
    "grpo_single_update": (on_policy_ratio, unclipped, sequence_mean),
    "dapo": (token_ratio, clipped_surrogate, token_mean),
    "bnpo": (token_ratio, clipped_surrogate, micro_batch_token_mean),
    "dr_grpo": (token_ratio, clipped_surrogate, budget_mean),
    "gspo": (sequence_ratio, clipped_surrogate, sequence_mean),
    "gspo_token": (sequence_ratio_per_token, clipped_surrogate, sequence_mean),
    "cispo": (token_ratio, clipped_weight, token_mean),
    "likelihood": (on_policy_ratio, log_likelihood, sequence_mean),
}


class Objective:
    """One of OBJECTIVES minus kl_coef times a KL estimate, the two averaged alike.

    `clip_eps_low`, `clip_eps_high`: the ratio is clipped to [1 - low, 1 + high]. `kl_estimator`: a name in KL.
    `kl_stale_correction`: multiply the estimate by the token ratio, for samples of an older policy (see
    grpo/algorithms/kl.py). Raises InputError on a name that does not exist.
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
        self.ratio, self.gain, self.mean = OBJECTIVES[name]
        self.clip_eps_low, self.clip_eps_high = clip_eps_low, clip_eps_high
        self.kl_coef, self.estimate_kl, self.kl_stale_correction = kl_coef, KL[kl_estimator], kl_stale_correction

    def __call__(self, tokens: Tokens, scale: Scale) -> tuple[Tensor, dict[str, Tensor]]:
        """-J, this micro-batch's part of the step's, and detached statistics.

        Statistics are sums over the micro-batch's tokens by the step's tokens, so the parts of a step add up:
        `clipped_low`, `clipped_high` (shares of tokens), `sampled_entropy` (-log pi, nats) and, with a reference, `kl`
        (the estimate as it enters the loss, nats). `ratio_min` and `ratio_max` combine by min and max.
        """
        assert tokens.ref_logprobs is not None or not self.kl_coef, (
            "a KL penalty needs the reference's log-probabilities"
        )
        tokens = tokens.without_padding()
        ratio = self.ratio(tokens)
        gain = self.gain(ratio, tokens, self.clip_eps_low, self.clip_eps_high)
        value = gain.value
        per_token = {
            "clipped_low": gain.clipped_low,
            "clipped_high": gain.clipped_high,
            "sampled_entropy": -tokens.logprobs,
        }
        if tokens.ref_logprobs is not None:
            kl = self.estimate_kl(tokens.logprobs, tokens.ref_logprobs)
            if self.kl_stale_correction:
                kl = kl * token_ratio(tokens)
            if self.kl_coef:  # 0 times an overflow would be nan
                value = value - self.kl_coef * kl
            per_token["kl"] = kl
        stats = {name: token_mean(x.detach(), tokens.mask, scale) for name, x in per_token.items()}
        padding = tokens.mask == 0
        stats["ratio_min"] = ratio.detach().masked_fill(padding, torch.inf).min()
        stats["ratio_max"] = ratio.detach().masked_fill(padding, -torch.inf).max()
        return -self.mean(value, tokens.mask, scale), stats
