"""Group advantages on rewards whose mean and standard deviation are plain to see."""

from __future__ import annotations

import torch

from grpo.advantages import group_advantages, zero_variance_share


def test_hens_example_uses_the_population_standard_deviation():
    # Mean 1/2, population variance 1/4: (1 - 1/2) / (1/2) = 1.
    assert group_advantages(torch.tensor([[1.0, 0.0, 1.0, 0.0]])).tolist() == [[1, -1, 1, -1]]


def test_a_single_success_weighs_more_than_each_failure():
    # Mean 1/4, variance 3/16: (3/4) / (sqrt(3)/4) = sqrt(3), (-1/4) / (sqrt(3)/4) = -1/sqrt(3).
    expected = torch.tensor([[3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]])
    torch.testing.assert_close(group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]])), expected)


def test_groups_do_not_see_each_other():
    both = group_advantages(torch.tensor([[1.0, 0.0], [100.0, 300.0]]))
    assert both.tolist() == [[1, -1], [-1, 1]]


def test_a_group_of_equal_rewards_teaches_nothing_and_is_counted():
    # 0.1 three times has a mean that is not exactly 0.1 in float32.
    rewards = torch.tensor([[0.1, 0.1, 0.1], [1.0, 0.0, 1.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    advantages = group_advantages(rewards)
    assert advantages[[0, 2, 3]].abs().sum() == 0
    assert torch.isfinite(advantages).all()
    assert zero_variance_share(rewards) == 0.75
