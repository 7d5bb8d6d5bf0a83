"""The DPO loss and the pairs it learns from, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo.algorithms.dpo import dpo_loss, pair_up

LN3 = math.log(3)


def loss_and_gradients(chosen, rejected, *, chosen_mask, rejected_mask, beta=1.0, length_average=False, pairs=1):
    """The arguments are log(pi/ref) per token: the reference says -1 on every token."""
    logprobs = [torch.tensor(x, dtype=torch.float64).sub(1).requires_grad_() for x in (chosen, rejected)]
    loss, stats = dpo_loss(
        *logprobs,
        *(torch.full_like(x, -1) for x in logprobs),
        torch.tensor(chosen_mask),
        torch.tensor(rejected_mask),
        beta=beta,
        length_average=length_average,
        pairs=pairs,
    )
    loss.backward()
    return loss.item(), [x.grad.tolist() for x in logprobs], {name: x.item() for name, x in stats.items()}


def test_by_hand():
    # Margin ln 3 - 0: sigma = 3/4, loss -ln(3/4), gradient -(1 - 3/4) on the chosen tokens, + on the rejected.
    loss, (chosen, rejected), stats = loss_and_gradients(
        [[LN3, 0.0]], [[0.5, -0.5, 9.0]], chosen_mask=[[1.0, 1.0]], rejected_mask=[[1.0, 1.0, 0.0]]
    )
    assert loss == pytest.approx(math.log(4 / 3))
    assert chosen == [pytest.approx([-1 / 4, -1 / 4])]
    assert rejected == [pytest.approx([1 / 4, 1 / 4, 0])]
    assert stats == pytest.approx({"accuracy": 1, "margin": LN3})


def test_length_average():
    # Means ln 3 over two tokens and 0 over one: the same margin, each token by its completion's length.
    loss, (chosen, rejected), _ = loss_and_gradients(
        [[LN3, LN3]], [[0.0, 9.0]], chosen_mask=[[1.0, 1.0]], rejected_mask=[[1.0, 0.0]], length_average=True
    )
    assert loss == pytest.approx(math.log(4 / 3))
    assert chosen == [pytest.approx([-1 / 8, -1 / 8])]
    assert rejected == [pytest.approx([1 / 4, 0])]


def test_beta_scales_the_margin():
    # 0.5 * -2 ln 3 = -ln 3: sigma = 1/4, loss -ln(1/4), gradient -0.5 * 3/4.
    loss, (chosen, rejected), stats = loss_and_gradients(
        [[-LN3]], [[LN3]], chosen_mask=[[1.0]], rejected_mask=[[1.0]], beta=0.5
    )
    assert loss == pytest.approx(math.log(4))
    assert (chosen, rejected) == ([[pytest.approx(-3 / 8)]], [[pytest.approx(3 / 8)]])
    assert stats == pytest.approx({"accuracy": 0, "margin": -LN3})


def test_a_policy_that_is_its_reference_starts_at_ln_2():
    loss, _, stats = loss_and_gradients([[0.0]], [[0.0]], chosen_mask=[[1.0]], rejected_mask=[[1.0]])
    assert loss == pytest.approx(math.log(2))
    assert stats == {"accuracy": 0, "margin": 0}


def test_parts_of_a_step_add_up():
    chosen, rejected, mask = [[1.0, 0.5], [-1.0, 2.0], [0.3, 9.0]], [[0.0, 1.0], [2.0, 1.0], [0.1, 9.0]], [1.0, 1.0]
    masks = [mask, mask, [1.0, 0.0]]

    def part(rows):
        pick = [[x[i] for i in rows] for x in (chosen, rejected, masks)]
        return loss_and_gradients(pick[0], pick[1], chosen_mask=pick[2], rejected_mask=pick[2], pairs=3)

    whole, first, second = part([0, 1, 2]), part([1]), part([2, 0])
    assert first[0] + second[0] == pytest.approx(whole[0])
    assert [first[1][0][0], second[1][0][1], second[1][0][0]] == [
        pytest.approx(whole[1][0][1]),
        pytest.approx(whole[1][0][0]),
        pytest.approx(whole[1][0][2]),
    ]
    assert {name: first[2][name] + second[2][name] for name in whole[2]} == pytest.approx(whole[2])


@pytest.mark.parametrize(
    ("rewards", "pairs"),
    [
        ([[1.0, 0.0, 1.0, 0.0]], [(0, 3), (2, 1)]),
        ([[0.2, 0.9, 0.5, 0.1]], [(1, 3), (2, 0)]),  # best with worst, second with second worst
        ([[1.0, 1.0, 1.0, 0.0]], [(0, 3)]),  # 1 and 1 is a tie
        ([[0.0, 0.5, 1.0]], [(2, 0)]),  # the middle one stays out
        ([[1.0, 1.0], [0.0, 2.0]], [(3, 2)]),  # indices run over all groups
        ([[1.0]], []),
    ],
)
def test_pair_up(rewards, pairs):
    assert pair_up(torch.tensor(rewards)) == pairs
