"""The unified view (DSM eq. 5, table 10) on a real language model: SFT, RFT, online RFT, DPO, PPO and GRPO all follow

    grad J = E over completions of (1/|o|) sum over t of GC_t grad log pi(o_t)

and differ in GC alone. Left side: the library's loss and one backward pass through the model. Right side: the gradient
of every token's log-probability by itself, weighted by GC from the formulas of table 10. All in float64 but for
Llama's norms, which compute in float32 whatever the model: hence 1e-6 of a gradient's largest entry.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from grpo.algorithms.dpo import dpo_loss
from grpo.algorithms.gae import gae, token_rewards
from grpo.algorithms.objectives import Objective
from grpo.algorithms.tokens import Normalizers, Tokens

PROMPT, LENGTHS = 3, [4, 2, 3, 4]
MASK = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).double()
RIGHT = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)[:, None].expand_as(MASK)
BETA = 0.3
NORMALIZERS = Normalizers(sequences=len(LENGTHS), tokens=sum(LENGTHS), budget=max(LENGTHS))


def language_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = dict(vocab_size=11, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.3)).double()


def logprobs_of(model: LlamaForCausalLM) -> Tensor:
    """[B, T] of completions that are the same for every model; padded on the right, where the mask is 0."""
    ids = torch.randint(11, (len(LENGTHS), PROMPT + max(LENGTHS)), generator=torch.Generator().manual_seed(7))
    logprobs = model(ids).logits.log_softmax(2)[:, PROMPT - 1 : -1]
    return logprobs.gather(2, ids[:, PROMPT:, None]).squeeze(2)


@pytest.fixture(scope="module")
def policy() -> LlamaForCausalLM:
    return language_model(0)


@pytest.fixture(scope="module")
def reference() -> Tensor:
    return logprobs_of(language_model(1)).detach()


def random(seed: int) -> Tensor:
    return torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ppo_advantages(logprobs: Tensor, reference: Tensor) -> Tensor:
    rewards = token_rewards(RIGHT[:, 0], logprobs.detach(), reference, MASK, BETA)
    return gae(rewards, random(3), MASK, gamma=1.0, lam=0.95)[0]


GROUP_ADVANTAGES = RIGHT * 2 - 1  # rewards 1, 0, 0, 1 of one group

# The right side: GC [B, T] from the policy's log-probabilities (without gradient) and the reference's.


def gc_of_dpo(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Rows are better, worse, better, worse. DSM leaves the factor beta out, as if it were part of the step size."""
    log_ratio = ((logprobs - reference) * MASK).sum(1) / MASK.sum(1)
    weight = BETA * torch.sigmoid(BETA * (log_ratio[1::2] - log_ratio[::2]))
    return torch.stack([weight, -weight], 1).flatten()[:, None].expand_as(MASK)


COEFFICIENTS = {
    "sft": lambda logprobs, reference: torch.ones_like(MASK),
    "rft": lambda logprobs, reference: RIGHT,
    "online_rft": lambda logprobs, reference: RIGHT,
    "dpo": gc_of_dpo,
    "ppo": ppo_advantages,
    "grpo": lambda logprobs, reference: GROUP_ADVANTAGES + BETA * ((reference - logprobs).exp() - 1),
}

# The left side: the losses as the library computes them.


def objective_loss(
    name: str, logprobs: Tensor, old: Tensor, reference: Tensor, advantages: Tensor, **options
) -> Tensor:
    defaults = dict(clip_eps_low=0.2, clip_eps_high=0.2, kl_coef=0.0, kl_estimator="k3", kl_stale_correction=False)
    return Objective(name, **(defaults | options))(Tokens(logprobs, old, reference, advantages, MASK), NORMALIZERS)[0]


def likelihood_loss(logprobs: Tensor, reference: Tensor, weights: Tensor) -> Tensor:
    # Demonstrations and the samples of RFT are not the policy's own: the sampler's log-probabilities are any.
    return objective_loss("likelihood", logprobs, random(5), reference, weights)


def pair_loss(logprobs: Tensor, reference: Tensor) -> Tensor:
    sides = [x[start::2] for x in (logprobs, reference, MASK) for start in (0, 1)]
    return dpo_loss(*sides, beta=BETA, length_average=True, pairs=NORMALIZERS.sequences)[0]


LOSSES = {
    "sft": lambda logprobs, reference: likelihood_loss(logprobs, reference, torch.ones_like(MASK)),
    "rft": lambda logprobs, reference: likelihood_loss(logprobs, reference, RIGHT),
    "online_rft": lambda logprobs, reference: (
        objective_loss(  # its own samples: RFT is GRPO with A = 1 if right, else 0
            "grpo", logprobs, logprobs.detach(), reference, RIGHT
        )
    ),
    "dpo": pair_loss,
    "ppo": lambda logprobs, reference: objective_loss(
        "grpo", logprobs, logprobs.detach(), reference, ppo_advantages(logprobs, reference)
    ),
    "grpo": lambda logprobs, reference: objective_loss(
        "grpo", logprobs, logprobs.detach(), reference, GROUP_ADVANTAGES, kl_coef=BETA
    ),
}


def weighted_score_functions(policy: LlamaForCausalLM, coefficients: Tensor) -> list[Tensor]:
    """(1/G) sum_i (1/|o_i|) sum_t GC_it grad log pi(o_it), one backward pass a token."""
    logprobs, parameters = logprobs_of(policy), list(policy.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for row, length in enumerate(LENGTHS):
        for column in range(length):
            scores = torch.autograd.grad(logprobs[row, column], parameters, retain_graph=True)
            weight = coefficients[row, column] / length / len(LENGTHS)
            total = [sum_ + weight * score for sum_, score in zip(total, scores, strict=True)]
    return total


def assert_same_direction(policy: LlamaForCausalLM, loss: Tensor, coefficients: Tensor) -> None:
    descent = torch.autograd.grad(loss, list(policy.parameters()))
    ascent = weighted_score_functions(policy, coefficients.detach())
    for down, up in zip(descent, ascent, strict=True):
        largest = up.abs().max().item()
        assert largest > 0
        torch.testing.assert_close(-down, up, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("method", COEFFICIENTS)
def test_the_gradient_is_the_coefficient_times_the_score(method, policy, reference):
    logprobs = logprobs_of(policy)
    coefficients = COEFFICIENTS[method](logprobs.detach(), reference)
    assert_same_direction(policy, LOSSES[method](logprobs, reference), coefficients)


def test_the_one_update_form_of_grpo_has_the_same_gradient(policy, reference):
    logprobs = logprobs_of(policy)
    loss = objective_loss("grpo_single_update", logprobs, random(5), reference, GROUP_ADVANTAGES, kl_coef=BETA)
    assert_same_direction(policy, loss, COEFFICIENTS["grpo"](logprobs.detach(), reference))


@pytest.mark.parametrize("corrected", [False, True])
def test_off_policy_the_ratio_weighs_the_advantage(policy, reference, corrected):
    # Clips too wide to bind: GC = rho A + beta (pi_ref/pi - 1). With the correction for stale samples the ratio weighs
    # the penalty too, and its coefficient becomes rho log(pi_ref/pi).
    logprobs = logprobs_of(policy)
    old = (logprobs + 0.3 * random(6)).detach()
    wide = dict(clip_eps_low=1e3, clip_eps_high=1e3, kl_coef=BETA, kl_stale_correction=corrected)
    loss = objective_loss("grpo", logprobs, old, reference, GROUP_ADVANTAGES, **wide)
    ratio, x = (logprobs - old).exp(), (reference - logprobs).exp()
    penalty = ratio * x.log() if corrected else x - 1
    assert_same_direction(policy, loss, ratio * GROUP_ADVANTAGES + BETA * penalty)


def test_a_clipped_token_has_no_coefficient(policy, reference):
    logprobs = logprobs_of(policy)
    old = (logprobs + 0.5 * random(6)).detach()
    ratio = (logprobs - old).exp().detach()
    stopped = ((ratio > 1.2) & (GROUP_ADVANTAGES > 0)) | ((ratio < 0.8) & (GROUP_ADVANTAGES < 0))
    assert 0 < (stopped * MASK).sum() < MASK.sum()
    loss = objective_loss("grpo", logprobs, old, reference, GROUP_ADVANTAGES)
    assert_same_direction(policy, loss, ratio * GROUP_ADVANTAGES * ~stopped)


def test_cispo_keeps_the_coefficient_of_every_token_bounded(policy, reference):
    logprobs = logprobs_of(policy)
    old = (logprobs + 0.5 * random(6)).detach()
    weight = (logprobs - old).exp().clamp(0.8, 1.2)
    loss = objective_loss("cispo", logprobs, old, reference, GROUP_ADVANTAGES)
    # CISPO averages over tokens: undo the view's 1/|o| and 1/G, and divide by the step's tokens.
    tokens_view = torch.tensor(LENGTHS)[:, None] * len(LENGTHS) / sum(LENGTHS)
    assert_same_direction(policy, loss, weight * GROUP_ADVANTAGES * tokens_view)
