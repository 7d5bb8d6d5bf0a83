"""Estimates of KL(policy || reference) from the log-probabilities of sampled tokens.

With x = reference/policy on a token that the policy sampled (Schulman, "Approximating KL divergence", 2020):
k1 = -log x, k2 = (log x)^2 / 2, k3 = x - log x - 1. How well an estimator measures the KL says little about its
gradient in a loss, so each docstring says both. For samples of an older policy, multiply an estimate by the token
ratio rho = policy/old and let the gradient flow through it: rho k1 and rho k3 then have the gradient of the KL
(for k3 it is rho k1 grad log pi token by token), rho k2 does not. This also holds on-policy, where rho = 1 still has
a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """-log x: unbiased, of either sign, high variance.

    As a loss it does nothing on average: its gradient is grad log pi, whose expectation under the policy is 0.
    It belongs in the reward (PPO), or in a loss only with the stale-sample correction.
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log x)^2 / 2: biased, never negative, low variance.

    As a loss it is right on-policy: its gradient -log x grad log pi is, on average, that of KL(policy || reference).
    """
    return (ref_logprobs - logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """x - log x - 1: unbiased, never negative, low variance (GRPO's choice, DSM eq. 4).

    As a loss its gradient (1 - x) grad log pi is, on average, that of the other KL, KL(reference || policy). The two
    gradients agree to first order where policy and reference are close.
    """
    log_x = ref_logprobs - logprobs
    return log_x.exp() - log_x - 1


Estimator = Callable[[Tensor, Tensor], Tensor]
"""(policy's log-probabilities, reference's) -> estimate; any shape, the same for both."""
KL: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}
