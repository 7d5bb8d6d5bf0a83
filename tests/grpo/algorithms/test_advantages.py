"""Advantages of rewards whose mean and standard deviation are plain to see."""

from __future__ import annotations

import pytest
import torch

from grpo.algorithms.advantages import ADVANTAGES, process_advantages, zero_variance_groups
from grpo.errors import InputError

HENS = [[1.0, 0.0, 1.0, 0.0]]  # 277 is right, 305 is not, 277 is, 297 is not
ROOT3 = 3**0.5


def advantages(name, rewards, std="population"):
    return ADVANTAGES[name](torch.tensor(rewards), std).tolist()


@pytest.mark.parametrize(
    ("name", "std", "first"),
    [
        ("grpo", "population", 1.0),  # mean 1/2, variance 1/4: (1 - 1/2) / (1/2)
        ("grpo", "sample", ROOT3 / 2),  # variance 4 * 1/4 / 3 = 1/3: (1/2) sqrt(3)
        ("dr_grpo", "population", 0.5),
        ("rloo", "population", 2 / 3),  # the other three earned 0, 1, 0: 1 - 1/3
        ("batch_std", "population", 1.0),  # one group is the whole batch
        ("batch_std", "sample", ROOT3 / 2),
    ],
)
def test_hens_example(name, std, first):
    assert advantages(name, HENS, std) == [pytest.approx([first, -first, first, -first])]


@pytest.mark.parametrize(
    ("name", "std", "success", "failure"),
    [
        ("grpo", "population", ROOT3, -1 / ROOT3),  # mean 1/4, variance 3/16: (3/4) / (sqrt(3)/4)
        ("grpo", "sample", 1.5, -0.5),  # variance 3/4 / 3 = 1/4: (3/4) / (1/2)
        ("dr_grpo", "population", 0.75, -0.25),
        ("rloo", "population", 1.0, -1 / 3),  # 1 - 0, and 0 - 1/3
    ],
)
def test_a_single_success_weighs_more_than_each_failure(name, std, success, failure):
    assert advantages(name, [[1.0, 0.0, 0.0, 0.0]], std) == [pytest.approx([success] + [failure] * 3)]


def test_groups_do_not_see_each_other():
    assert advantages("grpo", [[1.0, 0.0], [100.0, 300.0]]) == [[1, -1], [-1, 1]]
    assert advantages("rloo", [[1.0, 0.0], [100.0, 300.0]]) == [[1, -1], [-200, 200]]


def test_batch_std_keeps_the_spread_of_groups():
    # Group means 1 and 1; the batch 0, 2, -2, 4 has mean 1, variance (1 + 1 + 9 + 9) / 4 = 5 (sample: 20/3).
    rewards = [[0.0, 2.0], [-2.0, 4.0]]
    for std, scale in {"population": 5**0.5, "sample": (20 / 3) ** 0.5}.items():
        first, second = advantages("batch_std", rewards, std)
        assert first == pytest.approx([-1 / scale, 1 / scale])
        assert second == pytest.approx([-3 / scale, 3 / scale])


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("std", ["population", "sample"])
def test_a_group_of_equal_rewards_teaches_nothing_and_is_found(name, std):
    # 0.1 three times has a mean that is not exactly 0.1 in float32; 1000 and 1000 + 2^-14 are neighbours there.
    rewards = [[0.1, 0.1, 0.1], [1.0, 0.0, 1.0], [2e4 + 0.1] * 3, [0.0, 0.0, 0.0], [1000, 1000, 1000 + 2**-14]]
    result = ADVANTAGES[name](torch.tensor(rewards), std)
    assert (result == 0).all(1).tolist() == [True, False, True, True, True]
    assert torch.isfinite(result).all()
    assert zero_variance_groups(torch.tensor(rewards)).tolist() == [True, False, True, True, True]


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("std", ["population", "sample"])
def test_a_group_of_one_teaches_nothing(name, std):
    assert advantages(name, [[3.0]], std) == [[0]]


def test_process_supervision_by_hand():
    # Step rewards 1, 0 | 1, 1, 0, 0 | none: mean 1/2, population std 1/2, so +1, -1 | +1, +1, -1, -1.
    result = process_advantages(
        [[1.0, 0.0], [1.0, 1.0, 0.0, 0.0], []], [[1, 2], [0, 2, 3, 4], []], [4, 5, 2], "population"
    )
    assert result.tolist() == [
        [0, 0, -1, 0, 0],  # token 0 and 1: +1 - 1; token 2: -1; token 3: after the last step; then padding
        [0, -1, -1, -2, -1],  # 1 + 1 - 1 - 1; 1 - 1 - 1; the same; -1 - 1; -1
        [0, 0, 0, 0, 0],  # no steps
    ]


def test_process_supervision_with_the_sample_standard_deviation():
    # 1 and 0: deviations 1/2, variance 1/4 + 1/4 = 1/2 over n - 1 = 1, so +-1/sqrt(2).
    result = process_advantages([[1.0], [0.0]], [[1], [0]], [2, 1], "sample")
    assert result.tolist() == [pytest.approx([0.5**0.5, 0.5**0.5]), pytest.approx([-(0.5**0.5), 0])]


def test_one_step_a_completion_is_outcome_supervision():
    result = process_advantages([[r] for r in HENS[0]], [[2]] * 4, [3] * 4, "population")
    assert result.tolist() == [[1, 1, 1], [-1, -1, -1], [1, 1, 1], [-1, -1, -1]]


def test_two_steps_that_end_on_one_token_both_count():
    # 2, 2 | 0, 0: mean 1, std 1, so +1, +1 | -1, -1.
    result = process_advantages([[2.0, 2.0], [0.0, 0.0]], [[0, 0], [0, 1]], [1, 2], "population")
    assert result.tolist() == [[2, 0], [-2, -1]]  # 1 + 1 on the one token; -1 - 1, then -1


@pytest.mark.parametrize("rewards", [[[0.1, 0.1], [0.1]], [[], []]])
def test_steps_that_earned_the_same_teach_nothing(rewards):
    ends = [list(range(len(r))) for r in rewards]
    assert process_advantages(rewards, ends, [2, 3], "population").tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("rewards", "ends", "message"),
    [([[1.0], [1.0, 0.0]], [[0], [0]], "completion 1: 2 step rewards for 1 steps"), ([[1.0]], [[2]], r"\[2\].*0 to 1")],
)
def test_steps_that_do_not_fit_are_refused(rewards, ends, message):
    with pytest.raises(InputError, match=message):
        process_advantages(rewards, ends, [2] * len(rewards), "population")
