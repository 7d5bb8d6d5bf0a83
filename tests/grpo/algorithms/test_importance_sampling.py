from __future__ import annotations

import math

import pytest
import torch

from grpo.algorithms.importance_sampling import correct_for_sampler
from grpo.algorithms.objectives import Objective
from grpo.algorithms.tokens import Normalizers, Tokens

NORMALIZERS = Normalizers(sequences=2, tokens=3, budget=2)
SAMPLER = torch.tensor([[0.25, 0.5], [0.5, 0.0]]).clamp(min=1e-9).log()


def tokens(advantages=((1.0, 1.0), (-2.0, 0.0))) -> Tokens:
    """Two completions, of two tokens and one; the trainer gives 0.5 where the sampler gave 0.25, 0.5 and 0.5."""
    half = torch.full((2, 2), math.log(0.5))
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    return Tokens(half.clone().requires_grad_(), half, None, torch.tensor(advantages), mask)


def test_a_tokens_advantage_is_weighted_by_trainer_over_sampler():
    corrected, stats = correct_for_sampler(tokens(), SAMPLER, 3.0, NORMALIZERS)
    # 0.5 / 0.25 = 2, 0.5 / 0.5 = 1
    torch.testing.assert_close(corrected.advantages, torch.tensor([[2.0, 1.0], [-2.0, 0.0]]))
    assert stats["sampler_difference_max"].item() == pytest.approx(math.log(2))
    assert stats["sampler_difference"].item() == pytest.approx(math.log(2) / 3)  # of three tokens one differs
    assert stats["sampler_truncated"].item() == 0


def test_the_weight_is_truncated_above_and_not_below():
    corrected, stats = correct_for_sampler(tokens(), SAMPLER, 1.5, NORMALIZERS)
    assert corrected.advantages[0, 0].item() == 1.5
    assert stats["sampler_truncated"].item() == pytest.approx(1 / 3)
    double = torch.full((2, 2), math.log(1.0))
    corrected, _ = correct_for_sampler(tokens(), double, 1.5, NORMALIZERS)
    torch.testing.assert_close(corrected.advantages, torch.tensor([[0.5, 0.5], [-1.0, 0.0]]))


@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo", "gspo_token", "likelihood"])
def test_the_gradient_of_a_sampled_token_is_its_weight_times_the_gradient_without(name):
    def gradient(given: Tokens) -> torch.Tensor:
        objective = Objective(
            name, clip_eps_low=0.2, clip_eps_high=0.2, kl_coef=0.0, kl_estimator="k3", kl_stale_correction=False
        )
        loss, _ = objective(given, NORMALIZERS)
        (found,) = torch.autograd.grad(loss, given.logprobs)
        return found

    plain = gradient(tokens())
    corrected, _ = correct_for_sampler(tokens(), SAMPLER, 3.0, NORMALIZERS)
    torch.testing.assert_close(gradient(corrected), plain * torch.tensor([[2.0, 1.0], [1.0, 0.0]]))


def test_in_expectation_the_sampler_is_replaced_by_the_policy():
    """Sum over x of q(x) (p(x) / q(x)) f(x) = sum of p(x) f(x), for every x that truncation leaves alone."""
    p, q, f = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2]), torch.tensor([1.0, -1.0, 3.0])
    given = Tokens(p.log()[None], p.log()[None], None, f[None], torch.ones(1, 3))
    corrected, _ = correct_for_sampler(given, q.log()[None], 2.0, Normalizers(1, 3, 3))
    assert (q * corrected.advantages).sum().item() == pytest.approx(0.5 - 0.3 + 0.6)
