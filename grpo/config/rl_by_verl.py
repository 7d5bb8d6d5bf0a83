"""What verl can run of RL's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo.config.experts import Experts
from grpo.config.trainers import check_even_shares, check_translated

if TYPE_CHECKING:
    from grpo.config.rl import RL

_UNTRANSLATED_OBJECTIVES = {
    "grpo_sequence": "its KL penalty is of whole sequences",
    "bnpo": "its mean is over a micro-batch",
}


def updates_per_rollout(settings: RL) -> int:
    """Optimizer steps on one rollout: one step of verl."""
    return settings.minibatches * settings.inner_epochs


def check_rl_by_verl(settings: RL) -> None:
    """Raises ValueError if verl cannot do what these settings ask for. They have a `hardware.trainer`."""
    hardware, optimizer = settings.hardware, settings.optimizer
    if settings.method != "grpo":
        raise ValueError(f"hardware.trainer: verl runs method 'grpo', not {settings.method!r}; leave it out")
    if reason := _UNTRANSLATED_OBJECTIVES.get(settings.objective):
        raise ValueError(f"hardware.trainer: objective {settings.objective!r} is not translated for verl: {reason}")
    check_translated(
        {
            "lora": settings.lora is not None,
            "validate_every": settings.validate_every is not None,
            "optimizer.kind": optimizer.kind != "adamw",
            "supervision": settings.supervision != "outcome",
            "curriculum": settings.curriculum is not None,
            "dynamic_sampling_rounds": settings.dynamic_sampling_rounds > 0,
            "rollouts_ahead": settings.rollouts_ahead > 0,
            "mask_truncated": settings.mask_truncated,
            "kl_stale_correction": settings.kl_stale_correction,
            "reference_mixing": settings.reference_mixing != 1,
            "experts": settings.experts != Experts(),
            "engine": settings.engine is not None,
            "sampling.top_p": settings.sampling.top_p < 1,
            "health.kl_budget.limit": settings.health.kl_budget.limit is not None,
            "hardware.sampler": hardware.sampler not in ("auto", "vllm"),
        }
    )
    updates = updates_per_rollout(settings)
    for name, steps in (("steps", settings.steps), ("reference_refresh_steps", settings.reference_refresh_steps or 0)):
        if steps % updates:
            raise ValueError(
                f"hardware.trainer: verl takes whole rollouts, but {name} ({steps}) is no multiple of minibatches * "
                f"inner_epochs ({updates}); set {steps - steps % updates or updates}"
            )
    changes = settings.reference_refresh_steps or settings.max_new_tokens_from
    if optimizer.final_learning_rate_share != 1 and (updates > 1 or changes):
        raise ValueError(
            "hardware.trainer: verl changes the rate once a rollout and plans it for one run; leave out "
            "optimizer.final_learning_rate_share with minibatches, inner_epochs, reference_refresh_steps or "
            "max_new_tokens_from"
        )
    if optimizer.warmup_steps and updates > 1:
        raise ValueError(
            "hardware.trainer: verl changes the rate once a rollout; leave out optimizer.warmup_steps with minibatches "
            "or inner_epochs"
        )
    completions = settings.prompts_per_step * settings.group_size
    check_even_shares("prompts_per_step * group_size", completions, hardware.copies)
