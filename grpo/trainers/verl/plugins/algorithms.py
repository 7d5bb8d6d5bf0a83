"""This library's advantages and objectives in verl's registries. verl imports this module in each of its
processes (VERL_USE_EXTERNAL_MODULES)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

from grpo.algorithms.advantages import ADVANTAGES, Std
from grpo.algorithms.objectives import OBJECTIVES, Objective
from grpo.algorithms.tokens import Normalizers, Tokens
from grpo.trainers.verl.protocol import advantage_name, objective_name


def group_advantages(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[str],
    of_rewards: Callable[[Tensor, Std], Tensor],
    std: Std,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Advantages [N, T] of N completions, twice, as verl also asks for returns. `index[i]`: the group of completion i.
    Raises ValueError if groups differ in size."""
    rewards = token_level_rewards.sum(-1)
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(index):
        rows.setdefault(group, []).append(row)
    if len(sizes := {*map(len, rows.values())}) != 1:
        raise ValueError(f"groups have {sorted(sizes)} completions; some were not sampled or not scored")
    order = torch.tensor([*rows.values()])
    advantages = torch.zeros_like(rewards)
    advantages[order] = of_rewards(rewards[order], std)
    of_tokens = advantages[:, None] * response_mask
    return of_tokens, of_tokens


def policy_loss(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, dict[str, float]]:
    """This process's part of the loss of an objective without its KL penalty, which verl adds, and statistics of the
    micro-batch: means over its tokens."""
    whole = config.global_batch_info
    objective = Objective(
        name,
        clip_eps_low=config.clip_ratio_low,
        clip_eps_high=config.clip_ratio_high,
        kl_coef=0.0,
        kl_estimator="k3",
        kl_stale_correction=False,
    )
    mask = response_mask.to(log_prob.dtype)
    tokens = Tokens(
        logprobs=log_prob,
        old_logprobs=old_log_prob,
        ref_logprobs=None,
        # min(rA, clip(r)A) w = min(r(Aw), clip(r)(Aw)) for a weight of at least 0
        advantages=advantages if rollout_is_weights is None else advantages * rollout_is_weights,
        mask=mask,
    )
    count, here = whole["batch_num_tokens"], mask.sum()
    normalizers = Normalizers(
        sequences=whole["global_batch_size"], tokens=count, budget=whole["loss_scale_factor"] or mask.shape[1]
    )
    loss, statistics = objective(tokens, normalizers)
    means = {
        f"actor/{name}": (statistics[name] * count / here.clamp(min=1)).item()
        for name in ("clipped_low", "clipped_high", "sampled_entropy")
    }
    return loss * whole["dp_size"], means


for _advantage, _of_rewards in ADVANTAGES.items():
    for _std in get_args(Std):
        register_adv_est(advantage_name(_advantage, _std))(partial(group_advantages, of_rewards=_of_rewards, std=_std))
for _objective in OBJECTIVES:
    register_policy_loss(objective_name(_objective))(partial(policy_loss, _objective))
