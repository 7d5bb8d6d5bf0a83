"""Credit assignment: one function for each value of `credit` in `grpo.rl.method_table`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.algorithms.advantages import ADVANTAGES, process_advantages, zero_variance_groups
from grpo.algorithms.dpo import pair_up
from grpo.algorithms.gae import gae, token_rewards, whiten
from grpo.algorithms.tokens import pad
from grpo.config.rl import RL
from grpo.rl.batch import CompletionGroup, TokenStep


@dataclass
class CreditInputs:
    """Inputs of credit assignment for P groups of G completions. Each list has one entry per completion."""

    rewards: Tensor  # [P, G]
    correct: list[bool]
    lengths: list[int]
    steps: list[list[TokenStep] | None] | None = None  # under process supervision; None for general prompts
    logprobs: list[Tensor] | None = None  # under the policy that sampled (PPO)
    ref_logprobs: list[Tensor] | None = None
    values: list[Tensor] | None = None


@dataclass
class Credit:
    """Learning signals for the update. Each list has one entry per completion."""

    advantages: list[Tensor]  # one value per token
    returns: list[Tensor] | None = None
    units: list[list[int]] | None = None  # None: each sequence is its own unit


def all_completions(inputs: CreditInputs, settings: RL) -> Credit:
    """Imitates every completion (SFT)."""
    return Credit([torch.ones(length) for length in inputs.lengths])


def correct(inputs: CreditInputs, settings: RL) -> Credit:
    """Imitates correct completions and ignores the others (RFT, online RFT)."""
    return Credit([torch.full((n,), float(ok)) for n, ok in zip(inputs.lengths, inputs.correct, strict=True)])


def preference_pairs(inputs: CreditInputs, settings: RL) -> Credit:
    """Pairs of a better and a worse completion of each problem (DPO)."""
    return Credit([torch.zeros(n) for n in inputs.lengths], units=[list(pair) for pair in pair_up(inputs.rewards)])


def group_relative(inputs: CreditInputs, settings: RL) -> Credit:
    """Group-relative advantages (GRPO): one per completion or, under process supervision, one per step
    for all its tokens."""
    outcome = ADVANTAGES[settings.advantage](inputs.rewards, settings.std).flatten().tolist()
    advantages = [torch.full((n,), a) for n, a in zip(inputs.lengths, outcome, strict=True)]
    size = inputs.rewards.shape[1]
    for start in range(0, len(inputs.steps or []), size):
        of_group = slice(start, start + size)
        steps = [of for of in (inputs.steps or [])[of_group] if of is not None]
        if steps:
            advantages[of_group] = _by_steps(steps, inputs.lengths[of_group], settings)
    return Credit(advantages)


def gae_over_values(inputs: CreditInputs, settings: RL) -> Credit:
    """Generalized advantage estimation with a learned value function and the KL penalty in the reward (PPO)."""
    assert inputs.logprobs is not None and inputs.values is not None
    mask = _padded([torch.ones(n) for n in inputs.lengths])
    reference = None if inputs.ref_logprobs is None else _padded(inputs.ref_logprobs)
    rewards = token_rewards(inputs.rewards.flatten(), _padded(inputs.logprobs), reference, mask, settings.kl_coef)
    advantages, returns = gae(rewards, _padded(inputs.values), mask, settings.ppo.gamma, settings.ppo.gae_lambda)
    if settings.ppo.whiten:
        advantages = whiten(advantages, mask)
    return Credit(_unpad(advantages, inputs.lengths), returns=_unpad(returns, inputs.lengths))


CREDITS: dict[str, Callable[[CreditInputs, RL], Credit]] = {
    "all": all_completions,
    "correct": correct,
    "preference_pairs": preference_pairs,
    "group_relative": group_relative,
    "gae": gae_over_values,
}


def teach_nothing(group: CompletionGroup) -> bool:
    """Whether all rewards of the group are equal (under process supervision: all step rewards), so that all its
    advantages are 0."""
    rewards = group.rewards
    if group.steps is not None:
        rewards = torch.tensor([reward for steps in group.steps for _, reward in steps])
    return bool(zero_variance_groups(rewards[None]).item())


def _by_steps(steps: list[list[TokenStep]], lengths: list[int], settings: RL) -> list[Tensor]:
    """Advantages of one group's completions."""
    rewards = [[reward for _, reward in of] for of in steps]
    ends = [[end for end, _ in of] for of in steps]
    return _unpad(process_advantages(rewards, ends, lengths, settings.std), lengths)


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return pad(rows, torch.device("cpu"))


def _unpad(table: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return [row[:length].clone() for row, length in zip(table, lengths, strict=True)]
