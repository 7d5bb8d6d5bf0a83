"""Objectives against numbers worked by hand.

Token probabilities are given as ratios to the policy that sampled, whose log-probability is -1 on every token.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grpo.algorithms.objectives import OBJECTIVES, Objective
from grpo.algorithms.tokens import Normalizers, Tokens
from grpo.errors import InputError

LN2 = math.log(2)
CLIPPED = [name for name, form in OBJECTIVES.items() if form.token_objective.__name__ == "clipped_surrogate"]
ONE = Normalizers(sequences=1, tokens=1, budget=1)


def make(ratios, advantages, mask=None, ref_minus_policy=None) -> Tokens:
    ratio = torch.tensor(ratios, dtype=torch.float64)
    logprobs = (ratio.log() - 1).requires_grad_()
    log_x = None if ref_minus_policy is None else torch.tensor(ref_minus_policy, dtype=torch.float64)
    return Tokens(
        logprobs=logprobs,
        old_logprobs=torch.full_like(ratio, -1.0),
        ref_logprobs=None if log_x is None else logprobs.detach() + log_x,
        advantages=torch.tensor(advantages, dtype=torch.float64).expand_as(ratio),
        mask=torch.ones_like(ratio) if mask is None else torch.tensor(mask, dtype=torch.float64),
    )


def objective(name, low=0.2, high=0.2, kl=0.0, estimator="k3", stale=False) -> Objective:
    return Objective(
        name, clip_eps_low=low, clip_eps_high=high, kl_coef=kl, kl_estimator=estimator, kl_stale_correction=stale
    )


def gain_and_gradient(objective: Objective, tokens: Tokens, normalizers: Normalizers):
    """J, dJ / d log pi and the statistics: the loss has the other sign."""
    loss, stats = objective(tokens, normalizers)
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs)
    return -loss.item(), -gradient, stats


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.1, 2.0, 2.2, 2.2),  # inside the clip the gradient of rho A is rho A
        (0.9, -2.0, -1.8, -1.8),
        (1.5, 2.0, 2.4, 0.0),  # a better token, already 1.5 times as likely: no more than 1.2 A
        (0.5, 2.0, 1.0, 1.0),  # min keeps the unclipped 0.5 A, not 0.8 A: a mistake is taken back
        (1.5, -2.0, -3.0, -3.0),  # min keeps the unclipped -3, not -2.4
        (0.5, -2.0, -1.6, 0.0),  # a worse token, already half as likely: no more than 0.8 A
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_objectives_agree_on_one_token(name, ratio, advantage, value, gradient):
    tokens = make([[ratio]], [[advantage]])
    result, slope, stats = gain_and_gradient(objective(name), tokens, ONE)
    assert result == pytest.approx(value)
    assert slope.item() == pytest.approx(gradient)
    assert stats["clipped_high"].item() == (ratio == 1.5 and advantage > 0)
    assert stats["clipped_low"].item() == (ratio == 0.5 and advantage < 0)


def test_every_clipped_objective_is_covered_above():
    assert CLIPPED == ["grpo", "grpo_sequence", "dapo", "bnpo", "dr_grpo", "gspo", "gspo_token"]


@pytest.mark.parametrize(
    ("ratio", "advantage", "value"),
    [(0.5, 1.0, 0.5), (1.25, 1.0, 1.25), (1.5, 1.0, 1.3), (0.5, -1.0, -0.6), (0.7, -1.0, -0.7), (1.5, -1.0, -1.5)],
)
def test_clips_are_independent(ratio, advantage, value):
    # The interval is 1 - 0.4 to 1 + 0.3.
    assert gain_and_gradient(objective("grpo", 0.4, 0.3), make([[ratio]], advantage), ONE)[0] == pytest.approx(value)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value"), [(1e-6, -1.0, -1e-6), (0.1, -1.0, -0.1), (10.9, 1.0, 10.9), (20.0, 1.0, 11.0)]
)
def test_eps_10_binds_above_only(ratio, advantage, value):
    # 1 - 10 = -9 and a ratio is positive. Above, it binds at 11.
    assert gain_and_gradient(objective("grpo", 10, 10), make([[ratio]], advantage), ONE)[0] == pytest.approx(value)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.8), (1.1, 1.1), (1.5, 1.3)])
def test_cispo_bounds_the_weight_and_keeps_the_gradient(ratio, weight, advantage):
    # J = w A log pi with log pi = log ratio - 1; w is a constant, so the gradient is w A.
    value, gradient, stats = gain_and_gradient(objective("cispo", 0.2, 0.3), make([[ratio]], advantage), ONE)
    assert value == pytest.approx(weight * advantage * (math.log(ratio) - 1))
    assert gradient.item() == pytest.approx(weight * advantage)
    assert (stats["clipped_low"].item(), stats["clipped_high"].item()) == (ratio == 0.5, ratio == 1.5)


def test_cispo_has_no_lower_bound_when_its_clip_is_1():
    _, gradient, stats = gain_and_gradient(objective("cispo", 1.0, 4.0), make([[0.01, 7.0]], 1.0), ONE)
    assert gradient.tolist() == [pytest.approx([0.01, 5.0])]  # 1 - 1 = 0 below, 1 + 4 = 5 above
    assert (stats["clipped_low"].item(), stats["clipped_high"].item()) == (0, 1)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5])
def test_a_single_update_reads_no_ratio_and_no_clip(ratio):
    # DSM eq. 21: the value is A, the gradient A, whatever the sampler's log-probabilities say.
    value, gradient, stats = gain_and_gradient(objective("grpo_single_update"), make([[ratio]], -2.0), ONE)
    assert (value, gradient.item()) == (-2, -2)
    assert (stats["clipped_low"].item(), stats["clipped_high"].item()) == (0, 0)


def test_likelihood_is_the_mean_log_probability_of_what_is_right():
    # Right: log pi of -1 + ln 2 and -1, mean -1 + ln(2)/2. Wrong: nothing. By two sequences.
    tokens = make([[2.0, 1.0], [1.5, 1.5]], [[1.0], [0.0]])
    value, gradient, _ = gain_and_gradient(objective("likelihood"), tokens, Normalizers(2, 4, 2))
    assert value == pytest.approx((-1 + LN2 / 2) / 2)
    assert gradient.tolist() == [[0.25, 0.25], [0, 0]]


# Lengths 3 and 1; on-policy, so a token's gain is its advantage: 1, 2, 3 and 5. The padding holds ratio 9, A 7.
UNEQUAL = make([[1.0, 1.0, 1.0], [1.0, 9.0, 9.0]], [[1.0, 2.0, 3.0], [5.0, 7.0, 7.0]], [[1, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize(
    ("name", "value", "weights"),  # weights: of a token of the first sequence, of the second's
    [
        ("grpo", (6 / 3 + 5 / 1) / 2, (1 / 6, 1 / 2)),
        ("grpo_single_update", (6 / 3 + 5 / 1) / 2, (1 / 6, 1 / 2)),
        ("gspo_token", (6 / 3 + 5 / 1) / 2, (1 / 6, 1 / 2)),
        ("dapo", (6 + 5) / 4, (1 / 4, 1 / 4)),
        ("bnpo", (6 + 5) / 4, (1 / 4, 1 / 4)),
        ("dr_grpo", (6 + 5) / (2 * 10), (1 / 20, 1 / 20)),
    ],
)
def test_how_tokens_and_sequences_weigh(name, value, weights):
    result, gradient, _ = gain_and_gradient(objective(name), UNEQUAL, Normalizers(sequences=2, tokens=4, budget=10))
    long, short = weights
    assert result == pytest.approx(value)
    assert gradient[0].tolist() == pytest.approx([1 * long, 2 * long, 3 * long])
    assert gradient[1].tolist() == [pytest.approx(5 * short), 0, 0]


def test_bnpo_depends_on_the_cut():
    # Each alone: 6/3 * 1/2 + 5/1 * 1/2 = 3.5 (that is GRPO), not the 11/4 of both together.
    parts = [
        Tokens(*(None if x is None else x[i : i + 1] for x in vars(UNEQUAL).values())) for i in range(len(UNEQUAL.mask))
    ]
    normalizers = Normalizers(sequences=2, tokens=4, budget=10)
    assert sum(objective("bnpo")(part, normalizers)[0].item() for part in parts) == pytest.approx(-3.5)


def test_gspo_judges_the_sequence():
    # s = sqrt(4 * 1) = 2 and sqrt(1.25 * 0.8) = 1; the padding of the second is not in its mean.
    tokens = make([[4.0, 1.0, 1.0], [1.25, 0.8, 9.0]], [[-1.0], [3.0]], [[1, 1, 0], [1, 1, 0]])
    for name in ("gspo", "gspo_token"):
        value, gradient, stats = gain_and_gradient(objective(name), tokens, Normalizers(2, 4, 3))
        assert value == pytest.approx((2 * -1 + 1 * 3) / 2)
        # Each token has s A / |o| / 2 sequences, its own ratio notwithstanding.
        assert gradient.tolist() == [pytest.approx([-0.5, -0.5, 0]), pytest.approx([0.75, 0.75, 0])]
        assert (stats["ratio_min"].item(), stats["ratio_max"].item()) == pytest.approx((1, 2))


def test_gspo_clips_all_tokens_of_a_sequence():
    # s = 2 with A > 0 is clipped to 1.2 though its second token has ratio 1.
    value, gradient, stats = gain_and_gradient(objective("gspo"), make([[4.0, 1.0]], 1.0), Normalizers(1, 2, 2))
    assert value == pytest.approx(1.2)
    assert gradient.abs().sum() == 0
    assert stats["clipped_high"] == 1


def test_gspo_token_lets_advantages_differ_within_a_sequence():
    # On-policy s = 1. GSPO: the mean advantage 2 over both tokens, 2/2 each. GSPO-token: 1/2 and 3/2.
    tokens = make([[1.0, 1.0]], [[1.0, 3.0]])
    assert gain_and_gradient(objective("gspo"), tokens, ONE)[1].tolist() == [[1, 1]]
    assert gain_and_gradient(objective("gspo_token"), tokens, ONE)[1].tolist() == [[0.5, 1.5]]


@pytest.mark.parametrize(
    ("ratios", "advantage", "value", "gradient"),
    [
        # R1 eq. 1, clip 0.2: pi(o)/pi_old(o) is 2 * 1.5 = 3, or 0.5 * 0.5 = 0.25, or 1.25 * 0.88 = 1.1.
        ([2.0, 1.5], 2.0, 1.2 * 2, 0.0),  # above 1.2, A > 0: clipped
        ([2.0, 1.5], -2.0, 3 * -2, 3 * -2),  # above 1.2, A < 0: min keeps it
        ([0.5, 0.5], 2.0, 0.25 * 2, 0.25 * 2),  # below 0.8, A > 0: min keeps it
        ([0.5, 0.5], -2.0, 0.8 * -2, 0.0),  # below 0.8, A < 0: clipped
        ([1.25, 0.88], 2.0, 1.1 * 2, 1.1 * 2),  # inside, though its first token is not
    ],
)
def test_the_sequence_form_clips_the_product_of_ratios(ratios, advantage, value, gradient):
    # A second sequence with advantage 0 takes part in the mean. Each token has the gradient rho A: no 1 / |o|.
    tokens = make([ratios, [1.0, 1.0]], [[advantage], [0.0]])
    result, slope, stats = gain_and_gradient(objective("grpo_sequence"), tokens, Normalizers(2, 4, 2))
    assert result == pytest.approx(value / 2)
    assert slope.tolist() == [pytest.approx([gradient / 2] * 2), [0, 0]]
    clipped = {"clipped_low": gradient == 0 and advantage < 0, "clipped_high": gradient == 0 and advantage > 0}
    assert {name: stats[name].item() for name in clipped} == {name: on / 2 for name, on in clipped.items()}
    product = ratios[0] * ratios[1]
    assert [stats["ratio_min"].item(), stats["ratio_max"].item()] == pytest.approx(sorted([product, 1.0]))


def test_the_sequence_form_is_no_geometric_mean_and_no_mean_of_tokens():
    # Ratios 4 and 1, A = 1, no clip: the product 4; GSPO's sqrt(4 * 1) = 2; the mean of both tokens (4 + 1) / 2.
    values = {
        name: gain_and_gradient(objective(name, 10, 10), make([[4.0, 1.0]], 1.0), ONE)[0]
        for name in ("grpo_sequence", "gspo", "grpo")
    }
    assert values == pytest.approx({"grpo_sequence": 4, "gspo": 2, "grpo": 2.5})


@pytest.mark.parametrize(
    ("estimator", "penalty", "slope"),  # x = 2 * 2 = 4 for two tokens, and the derivative in each log pi
    [("k1", -2 * LN2, 1.0), ("k2", (2 * LN2) ** 2 / 2, -2 * LN2), ("k3", 3 - 2 * LN2, -3.0)],
)
def test_the_sequence_form_has_the_kl_of_the_sequence(estimator, penalty, slope):
    # A = 0, beta = 0.1. The third token is padding. The metric stays the mean over tokens, with x = 2 on each.
    tokens = make([[1.0, 1.0, 1.0]], 0.0, [[1, 1, 0]], [[LN2, LN2, 5.0]])
    chosen = objective("grpo_sequence", kl=0.1, estimator=estimator)
    value, gradient, stats = gain_and_gradient(chosen, tokens, Normalizers(1, 2, 3))
    assert value == pytest.approx(-0.1 * penalty)
    assert gradient.tolist() == [pytest.approx([-0.1 * slope, -0.1 * slope, 0])]
    per_token = {"k1": -LN2, "k2": LN2**2 / 2, "k3": 1 - LN2}[estimator]
    assert stats["kl"].item() == pytest.approx(per_token)


def test_the_sequence_form_corrects_its_kl_by_the_ratio_of_the_sequence():
    # rho = 3 * 2 = 6 and x = 2: rho k1 = -6 ln 2; its derivative in each log pi is rho (k1 + 1).
    tokens = make([[3.0, 2.0]], 0.0, ref_minus_policy=[[LN2, 0.0]])
    chosen = objective("grpo_sequence", kl=0.1, estimator="k1", stale=True)
    value, gradient, _ = gain_and_gradient(chosen, tokens, ONE)
    assert value == pytest.approx(-0.1 * 6 * -LN2)
    assert gradient.tolist() == [pytest.approx([-0.1 * 6 * (1 - LN2)] * 2)]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_sequence_form_does_not_overflow(advantage):
    # 3,000 tokens, each twice as likely as before, and half as likely as under the reference: 2^3000 is no number.
    tokens = make([[2.0] * 3000], advantage, ref_minus_policy=[[LN2] * 3000])
    value, gradient, _ = gain_and_gradient(objective("grpo_sequence", kl=0.001), tokens, Normalizers(1, 3000, 3000))
    held = math.exp(20)
    assert value == pytest.approx((1.2 if advantage > 0 else -held) - 0.001 * (held - 20 - 1))
    # Of the gain rho A, of the penalty beta (x - 1): pulled back as strongly as e^20 says.
    slope = (0 if advantage > 0 else -held) + 0.001 * (held - 1)
    torch.testing.assert_close(gradient, torch.full_like(gradient, slope))


@pytest.mark.parametrize(
    ("estimator", "penalty", "slope"),  # at x = 2, and the derivative in log pi
    [("k1", -LN2, 1.0), ("k2", LN2**2 / 2, -LN2), ("k3", 1 - LN2, -1.0)],
)
def test_kl_term(estimator, penalty, slope):
    # A = 0, beta = 0.1: J = -0.1 k. The second token is padding.
    tokens = make([[1.0, 1.0]], 0.0, [[1, 0]], [[LN2, 5.0]])
    value, gradient, stats = gain_and_gradient(objective("grpo", kl=0.1, estimator=estimator), tokens, ONE)
    assert value == pytest.approx(-0.1 * penalty)
    assert gradient.tolist() == [pytest.approx([-0.1 * slope, 0])]
    assert stats["kl"].item() == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("estimator", "penalty", "slope"),  # rho = 3, x = 2: rho k and rho (k + k')
    [("k1", -3 * LN2, 3 * (1 - LN2)), ("k2", 1.5 * LN2**2, 3 * (LN2**2 / 2 - LN2)), ("k3", 3 * (1 - LN2), -3 * LN2)],
)
def test_kl_term_for_stale_samples(estimator, penalty, slope):
    tokens = make([[3.0]], 0.0, ref_minus_policy=[[LN2]])
    value, gradient, stats = gain_and_gradient(objective("grpo", kl=0.1, estimator=estimator, stale=True), tokens, ONE)
    assert value == pytest.approx(-0.1 * penalty)
    assert gradient.item() == pytest.approx(-0.1 * slope)
    assert stats["kl"].item() == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("name", "value"),
    [("grpo", (2 / 3 + 1) / 2), ("dapo", 3 / 4), ("bnpo", 3 / 4), ("dr_grpo", 3 / 20), ("cispo", 3 / 4)],
)
def test_the_penalty_is_averaged_like_the_gain(name, value):
    # k1 is -(1, 1, 0) on the first sequence and -1 on the second; A = 0 and beta = 1.
    tokens = make([[1.0] * 3] * 2, 0.0, [[1, 1, 1], [1, 0, 0]], [[1.0, 1.0, 0.0], [1.0, 4.0, 4.0]])
    result, _, _ = gain_and_gradient(objective(name, kl=1.0, estimator="k1"), tokens, Normalizers(2, 4, 10))
    assert result == pytest.approx(value)


def test_gradient_coefficient_with_kl():
    # GC = A + beta (pi_ref/pi - 1) (DSM table 10): 1 + 0.5 * (2 - 1) = 1.5.
    tokens = make([[1.0]], 1.0, ref_minus_policy=[[LN2]])
    assert gain_and_gradient(objective("grpo", kl=0.5), tokens, ONE)[1].item() == pytest.approx(1.5)


def test_statistics():
    tokens = make(
        [[1.5, 1.0, 0.5], [1.5, 0.5, 0.01]],
        [[1.0], [-1.0]],
        [[1, 1, 1], [1, 1, 0]],
        [[LN2, 0.0, 0.0], [0.0, 0.0, 9.0]],
    )
    _, stats = objective("grpo")(tokens, Normalizers(sequences=2, tokens=10, budget=3))  # 5 of the step's 10 tokens
    # A > 0: 1.5 is stopped; 0.5 is not. A < 0: 0.5 is stopped; 1.5 is not. The padding is in nothing.
    # log pi = log ratio - 1, and the ratios multiply to 1.5 * 0.5 * 1.5 * 0.5 = 9/16.
    expected = {
        "clipped_low": 0.1,
        "clipped_high": 0.1,
        "sampled_entropy": (5 - math.log(9 / 16)) / 10,
        "kl": (1 - LN2) / 10,
        "ratio_min": 0.5,
        "ratio_max": 1.5,
    }
    assert {name: x.item() for name, x in stats.items()} == pytest.approx(expected)
    assert not any(x.requires_grad for x in stats.values())


def test_without_a_reference_there_is_no_kl():
    assert "kl" not in objective("grpo")(make([[1.0]], 1.0), ONE)[1]
    with pytest.raises(AssertionError, match="reference"):
        objective("grpo", kl=0.1)(make([[1.0]], 1.0), ONE)


def random_tokens(rows=6, width=5) -> Tokens:
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64) / 2

    lengths = torch.tensor([5, 1, 3, 0, 4, 2])  # an empty completion too
    return Tokens(
        logprobs=(draw() - 2).requires_grad_(),
        old_logprobs=draw() - 2,
        ref_logprobs=draw() - 2,
        advantages=draw(),
        mask=(torch.arange(width) < lengths[:, None]).double(),
    )


@pytest.mark.parametrize("name", sorted(OBJECTIVES.keys() - {"bnpo"}))
def test_parts_of_a_step_add_up(name):
    tokens, chosen = random_tokens(), objective(name, kl=0.3, stale=True)
    normalizers = Normalizers(sequences=6, tokens=15, budget=5)
    loss, stats = chosen(tokens, normalizers)
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs)
    assert loss.item() and gradient.abs().sum() > 0

    parts = [[4, 0], [1], [5, 3, 2]]
    results = [chosen(Tokens(*(x[rows] for x in vars(tokens).values())), normalizers) for rows in parts]
    total = torch.stack([part for part, _ in results]).sum()
    (gradient_of_parts,) = torch.autograd.grad(total, tokens.logprobs)
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(gradient_of_parts, gradient)
    for key, whole in stats.items():
        values = torch.stack([part[key] for _, part in results])
        combined = {"_min": values.min(), "_max": values.max()}.get(key[-4:], values.sum())
        torch.testing.assert_close(combined, whole)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("rubbish", [math.inf, -math.inf, math.nan, 1e6])
def test_what_stands_in_the_padding_is_never_read(name, rubbish):
    clean, chosen = random_tokens(), objective(name, kl=0.3, stale=True)
    padding = clean.mask == 0
    dirty = replace(
        clean,
        **{key: x.detach().masked_fill(padding, rubbish) for key, x in vars(clean).items() if key != "mask"},
    )
    dirty.logprobs.requires_grad_()
    normalizers = Normalizers(sequences=6, tokens=15, budget=5)
    expected_value, expected_gradient, expected_stats = gain_and_gradient(chosen, clean, normalizers)
    value, gradient, stats = gain_and_gradient(chosen, dirty, normalizers)
    assert value == expected_value
    assert torch.equal(gradient, expected_gradient)
    assert gradient[padding].abs().sum() == 0
    assert stats == expected_stats


@pytest.mark.parametrize(("wrong", "named"), [({"name": "gpro"}, "'gpro'.*dr_grpo"), ({"estimator": "k4"}, "'k4'.*k3")])
def test_a_name_that_does_not_exist_is_answered_with_those_that_do(wrong, named):
    with pytest.raises(InputError, match=named):
        objective(**{"name": "grpo", **wrong})
