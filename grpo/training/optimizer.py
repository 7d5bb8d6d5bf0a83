"""The optimizer and the learning-rate schedule of every training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from grpo.config.common import Optimizer
from grpo.errors import InputError
from grpo.training.optimizers.muon import Muon, groups_of

Parameters = Iterable[torch.nn.Parameter] | list[dict[str, Any]]


def make_optimizer(parameters: Parameters, settings: Optimizer) -> torch.optim.Optimizer:
    """Creates the optimizer in the settings. Parameter groups may have their own peak learning rate ("lr"). Raises
    InputError if that variant is not installed or does not support the parameters' device."""
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (0.9, settings.adam_beta2),
        "weight_decay": settings.weight_decay,
    }
    return KINDS[settings.kind](parameters, options)


def trained(model: nn.Module, settings: Optimizer) -> Parameters:
    """The model's trained parameters, in the groups that the optimizer in the settings needs."""
    return groups_of(model) if settings.kind == "muon" else [p for p in model.parameters() if p.requires_grad]


def learning_rate_share(step: int, steps: int, settings: Optimizer) -> float:
    """Share of the peak learning rate at optimizer step `step` of `steps`, both counted from 0: linear warm-up, then
    a half cosine down to `final_learning_rate_share`."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    floor = settings.final_learning_rate_share
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def step_if_finite(optimizer: torch.optim.Optimizer, measured: Iterable[float]) -> bool:
    """Moves the weights and clears the gradients. Returns whether the weights moved: not if a number that was measured
    for this step, such as its loss or gradient norm, is NaN or infinite, which would stay in the weights and moments.

    The numbers must be the same in all processes.
    """
    moves = all(map(math.isfinite, measured))
    if moves:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return moves


def _adamw(parameters: Parameters, options: dict[str, Any]) -> torch.optim.Optimizer:
    # Fused: one pass over the weights and no temporary copies of them.
    return torch.optim.AdamW(parameters, **options, fused=True)


def _adamw_8bit(parameters: Parameters, options: dict[str, Any]) -> torch.optim.Optimizer:
    try:
        from grpo.training.optimizers.adamw_8bit import DEVICES, AdamW8bit
    except ImportError as error:
        raise InputError(
            f"optimizer.kind 'adamw_8bit' needs bitsandbytes ({error}); pip install bitsandbytes, or take 'adamw'"
        ) from None
    optimizer = AdamW8bit(parameters, **options)
    devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
    if foreign := devices - DEVICES:
        raise InputError(f"optimizer.kind 'adamw_8bit' does not work on device {foreign.pop()!r}; take 'adamw'")
    return optimizer


def _muon(parameters: Parameters, options: dict[str, Any]) -> torch.optim.Optimizer:
    return Muon([*parameters], **options)


KINDS: dict[str, Callable[[Parameters, dict[str, Any]], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "muon": _muon,
}
