"""The optimizer and its schedule, the same in every loop."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from grpo.config import Optimizer


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter] | list[dict[str, Any]], settings: Optimizer
) -> torch.optim.AdamW:
    """AdamW; groups of parameters may have peak learning rates of their own ("lr")."""
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(0.9, settings.adam_beta2),
        weight_decay=settings.weight_decay,
        fused=True,  # one pass over the weights and no temporary copies of them
    )


def learning_rate_share(step: int, steps: int, settings: Optimizer) -> float:
    """Share of the peak learning rate at optimizer step `step` of `steps`, both counted from 0: linear warm-up, then
    a half cosine down to `final_learning_rate_share`."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    floor = settings.final_learning_rate_share
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
