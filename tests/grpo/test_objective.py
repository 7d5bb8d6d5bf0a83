"""The GRPO objective against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo.objective import clipped_surrogate, grpo_loss, k3


def loss_of(logprobs, old, reference, advantages, mask, *, low=0.2, high=0.2, kl=0.0):
    as_tensor = [None if x is None else torch.as_tensor(x) for x in (logprobs, old, reference, advantages, mask)]
    return grpo_loss(*as_tensor, clip_eps_low=low, clip_eps_high=high, kl_coef=kl)


def test_k3_by_hand():
    # x = 2: 2 - ln 2 - 1; x = 1/2: 1/2 + ln 2 - 1; x = 1: 0.
    reference = torch.tensor([math.log(2), -math.log(2), 0.0])
    expected = torch.tensor([1 - math.log(2), math.log(2) - 0.5, 0.0])
    torch.testing.assert_close(k3(torch.zeros(3), reference), expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value"),
    [
        (1.0, 2.0, 2.0),
        (1.5, 2.0, 2.4),  # better token, already 1.5 times as likely: no more than 1.2 A
        (0.5, 2.0, 1.0),  # min keeps the unclipped 0.5 A, not 0.8 A
        (1.5, -2.0, -3.0),  # min keeps the unclipped -3, not -2.4
        (0.5, -2.0, -1.6),  # worse token, already half as likely: no more than 0.8 A
    ],
)
def test_surrogate_on_both_sides_of_the_clip(ratio, advantage, value):
    result = clipped_surrogate(torch.tensor([[ratio]]), torch.tensor([[advantage]]), 0.2, 0.2)
    assert result.item() == pytest.approx(value)


def test_clips_are_independent():
    ratio = torch.tensor([[0.5, 1.25, 1.5]])
    assert clipped_surrogate(ratio, torch.tensor([[1.0]]), 0.2, 0.3).tolist()[0] == pytest.approx([0.5, 1.25, 1.3])
    assert clipped_surrogate(ratio, torch.tensor([[-1.0]]), 0.4, 0.3).tolist()[0] == pytest.approx([-0.6, -1.25, -1.5])


def test_eps_10_never_binds_below():
    # 1 - 10 = -9 and a ratio is positive. Above, it binds at 11.
    ratio = torch.tensor([[1e-6, 0.1, 1.0, 10.9, 20.0]])
    down = clipped_surrogate(ratio, torch.tensor([[-1.0]]), 10, 10)
    up = clipped_surrogate(ratio, torch.tensor([[1.0]]), 10, 10)
    torch.testing.assert_close(down, -ratio)
    torch.testing.assert_close(up, torch.tensor([[1e-6, 0.1, 1.0, 10.9, 11.0]]))


def test_each_sequence_counts_by_its_own_mean():
    # Ratios: 1, 1.1, 1.1 (|o| = 3) with A = 1 and 0.9 (|o| = 1) with A = -2; what stands in the padding is not read.
    logprobs = [[0.0, math.log(1.1), math.log(1.1)], [math.log(0.9), 5.0, 5.0]]
    mask = [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    loss, stats = loss_of(logprobs, torch.zeros(2, 3), None, [1.0, -2.0], mask)
    # J = (1 + 1.1 + 1.1) / 3 + 0.9 * -2.
    assert loss.item() == pytest.approx(-(3.2 / 3 - 1.8))
    assert stats.keys() == {"clipped_share"}
    assert stats["clipped_share"] == 0


def test_clipped_share_counts_only_where_the_clip_stops_the_gradient():
    logprobs = [[math.log(1.5), 0.0], [math.log(1.5), math.log(0.5)]]
    _, stats = loss_of(logprobs, torch.zeros(2, 2), None, [1.0, -1.0], torch.ones(2, 2))
    # Row 1: 1.5 with A > 0 is stopped, 1 is not. Row 2: 1.5 with A < 0 is not, 0.5 is. 1/2 + 1/2.
    assert stats["clipped_share"] == 1


def test_kl_term():
    # Reference twice as likely on the one token: k3 = 1 - ln 2; with A = 0 the loss is beta k3.
    loss, stats = loss_of([[0.0, 9.0]], [[0.0, 9.0]], [[math.log(2), 0.0]], [0.0], [[1.0, 0.0]], kl=0.1)
    assert loss.item() == pytest.approx(0.1 * (1 - math.log(2)))
    assert stats["kl"].item() == pytest.approx(1 - math.log(2))


def test_on_policy_gradient_is_the_advantage_over_the_length():
    # Unified view, no KL: d(-J)/d log pi_t = -A / |o| on the completion, 0 on the padding.
    logprobs = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -0.7, 0.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    loss, _ = loss_of(logprobs, logprobs.detach(), None, [3.0, -4.0], mask)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1.0, -1.0, -1.0], [2.0, 2.0, 0.0]]))


def test_gradient_coefficient_with_kl():
    # GC = A + beta (pi_ref/pi - 1) (DSM table 10): 1 + 0.5 * (2 - 1) = 1.5; the loss has the other sign.
    logprobs = torch.zeros(1, 1, requires_grad=True)
    loss, _ = loss_of(logprobs, [[0.0]], [[math.log(2)]], [1.0], [[1.0]], kl=0.5)
    loss.backward()
    assert logprobs.grad.item() == pytest.approx(-1.5)


def test_a_clipped_token_has_no_gradient():
    logprobs = torch.tensor([[math.log(1.5), 0.0]], requires_grad=True)
    loss, _ = loss_of(logprobs, [[0.0, 0.0]], None, [1.0], [[1.0, 1.0]])
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -0.5]]))
