"""KL estimators: their values, and what their gradients are on average when they stand in a loss."""

from __future__ import annotations

import math

import pytest
import torch

from grpo.algorithms.kl import KL

LN2, LN3 = math.log(2), math.log(3)


@pytest.mark.parametrize(
    ("estimator", "expected"),  # at x = reference/policy = 2, 1/2 and 1
    [
        ("k1", [-LN2, LN2, 0]),
        ("k2", [LN2**2 / 2, LN2**2 / 2, 0]),
        ("k3", [2 - LN2 - 1, 0.5 + LN2 - 1, 0]),
    ],
)
def test_values_by_hand(estimator, expected):
    reference = torch.tensor([LN2, -LN2, 0.0])
    torch.testing.assert_close(KL[estimator](torch.zeros(3), reference), torch.tensor(expected, dtype=torch.float32))


def coin(heads: float) -> torch.Tensor:
    return torch.tensor([heads, 1 - heads], dtype=torch.float64)


def expectation(estimator: str, sampled_by: torch.Tensor, corrected: bool) -> tuple[float, float]:
    """Value of an estimator and its gradient, averaged exactly over the two outcomes that `sampled_by` draws.

    The policy is a coin with P(heads) = sigmoid(z) at z = 0, so d log pi / dz is 1/2 on heads and -1/2 on tails. The
    reference is the coin (1/4, 3/4): KL(policy || reference) = ln(2)/2 + ln(2/3)/2 = ln(4/3)/2, and its derivative
    in z is 1/4 (ln 2 - ln 2/3) = ln(3)/4. That of KL(reference || policy) is sigmoid(0) - 1/4 = 1/4.
    """
    z = torch.zeros((), dtype=torch.float64, requires_grad=True)
    logprobs = torch.nn.functional.logsigmoid(torch.stack([z, -z]))
    estimate = KL[estimator](logprobs, coin(0.25).log())
    if corrected:
        estimate = estimate * (logprobs - sampled_by.log()).exp()
    average = (sampled_by * estimate).sum()
    average.backward()
    return average.item(), z.grad.item()


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", math.log(4 / 3) / 2, 0),  # unbiased, and useless as a loss
        ("k2", (LN2**2 + math.log(1.5) ** 2) / 4, LN3 / 4),  # biased, with the right gradient
        ("k3", math.log(4 / 3) / 2, 1 / 4),  # unbiased, with the gradient of KL(reference || policy)
    ],
)
def test_on_policy_averages(estimator, value, gradient):
    assert expectation(estimator, coin(0.5), corrected=False) == pytest.approx((value, gradient))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_ratio_makes_value_and_gradient_right_for_samples_of_an_older_policy(estimator):
    assert expectation(estimator, coin(0.2), corrected=True) == pytest.approx((math.log(4 / 3) / 2, LN3 / 4))


def test_without_the_ratio_samples_of_an_older_policy_bias_the_gradient():
    # Heads 1/5, tails 4/5: k2's gradient is log(pi/ref) d log pi, 1/5 ln 2 / 2 - 4/5 ln(2/3) / 2.
    _, gradient = expectation("k2", coin(0.2), corrected=False)
    assert gradient == pytest.approx(LN2 / 10 - 0.4 * math.log(2 / 3))
    assert gradient != pytest.approx(LN3 / 4, rel=0.1)
    # The ratio adds a term of its own to k2: E[k2 d log pi] = 1/4 (ln(2)^2 / 2 - ln(3/2)^2 / 2).
    _, gradient = expectation("k2", coin(0.2), corrected=True)
    assert gradient == pytest.approx(LN3 / 4 + (LN2**2 - math.log(1.5) ** 2) / 8)
