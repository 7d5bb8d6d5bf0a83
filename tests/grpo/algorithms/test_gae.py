"""PPO's rewards, advantages and value loss, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo.algorithms.gae import gae, token_rewards, value_loss, whiten
from grpo.algorithms.tokens import Normalizers


def t(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def rows(tensor: torch.Tensor):
    return [pytest.approx(row) for row in tensor.tolist()]


def test_token_rewards():
    # log(pi/ref) = 1, -2, 0.5 times -0.1, the outcome 1 on the last token; the second row ends after one token.
    logprobs, reference = t([-1, -3, -0.5], [-1, 9, 9]), t([-2, -1, -1], [-1.5, math.inf, math.nan])
    rewards = token_rewards(torch.tensor([1.0, -2.0]), logprobs, reference, t([1, 1, 1], [1, 0, 0]), 0.1)
    assert rows(rewards) == [[-0.1, 0.2, 0.95], [-2.05, 0, 0]]


def test_token_rewards_without_a_reference_are_the_outcome():
    rewards = token_rewards(torch.tensor([3.0, 5.0]), t([0, 0], [0, 0]), None, t([1, 1], [0, 0]), 0.1)
    assert rewards.tolist() == [[0, 3], [0, 0]]  # a completion of no tokens has no place for its outcome


@pytest.mark.parametrize(
    ("gamma", "lam", "advantages", "returns"),
    [
        # Sum of the rewards to come minus V.
        (1.0, 1.0, [0.5, 0.5, 0.5], [1, 1, 1]),
        # delta alone: 0 + V' - V = 0 and at the end 1 - 0.5.
        (1.0, 0.0, [0, 0, 0.5], [0.5, 0.5, 1]),
        # delta = -0.25, -0.25, 0.5; -0.25 + 0.25 * 0.5 = -0.125; -0.25 + 0.25 * -0.125 = -0.28125.
        (0.5, 0.5, [-0.28125, -0.125, 0.5], [0.21875, 0.375, 1]),
    ],
)
def test_gae_by_hand(gamma, lam, advantages, returns):
    result = gae(t([0, 0, 1]), t([0.5, 0.5, 0.5]), t([1, 1, 1]), gamma, lam)
    assert [rows(x) for x in result] == [[advantages], [returns]]


def test_gae_of_a_short_completion_does_not_see_its_padding():
    mask = t([1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0])
    values = t([0.5, 0.25, 7, math.nan], [0, 0, 0, 0], [7, 7, 7, 7])
    advantages, returns = gae(t([0, 1, 9, math.inf], [0, 0, 0, 2], [0, 0, 0, 0]), values, mask, 1.0, 0.5)
    # delta = -0.25, 0.75: -0.25 + 0.5 * 0.75 = 0.125. Second row: 2 halved at every step back.
    assert rows(advantages) == [[0.125, 0.75, 0, 0], [0.25, 0.5, 1, 2], [0, 0, 0, 0]]
    assert rows(returns) == [[0.625, 1, 0, 0], [0.25, 0.5, 1, 2], [0, 0, 0, 0]]


def test_whiten():
    # 1, 3, 3, 1: mean 2, std 1. The padding is in neither and stays 0.
    assert whiten(t([1, 3, 100], [3, 1, 1]), t([1, 1, 0], [1, 1, 0])).tolist() == [[-1, 1, 0], [1, -1, 0]]
    assert whiten(t([0.1, 0.1, 0.1]), t([1, 1, 1])).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(
    ("value", "loss", "gradient"),  # V_old = 0, c = 0.2, return 1
    [
        (0.1, 0.5 * 0.9**2, -0.9),  # inside the clip
        (0.5, 0.5 * 0.8**2, 0),  # moved far enough for this rollout: judged as 0.2
        (-0.5, 0.5 * 1.5**2, -1.5),  # moved the wrong way: the larger, unclipped error
        (2.5, 0.5 * 1.5**2, 1.5),  # overshot by more than the clipped value still lacks
    ],
)
def test_value_loss_on_both_sides_of_the_clip(value, loss, gradient):
    values = t([value, 5]).requires_grad_()
    result = value_loss(values, t([0, 0]), t([1, 9]), t([1, 0]), 0.2, Normalizers(sequences=1, tokens=1, budget=2))
    result.backward()
    assert result.item() == pytest.approx(loss)
    assert rows(values.grad) == [[gradient, 0]]


def test_value_loss_parts_add_up():
    # Errors 1, 2, 3 on three tokens: (1 + 4 + 9) / 2 / 3.
    returns, mask, zero = t([1, 2], [3, math.nan]), t([1, 1], [1, 0]), torch.zeros(2, 2)
    normalizers = Normalizers(sequences=2, tokens=3, budget=2)
    parts = [value_loss(zero[i], zero[i], returns[i], mask[i], 0.2, normalizers) for i in ([0], [1])]
    assert [x.item() for x in parts] == pytest.approx([5 / 6, 9 / 6])
    assert value_loss(zero, zero, returns, mask, 0.2, normalizers).item() == pytest.approx(14 / 6)
