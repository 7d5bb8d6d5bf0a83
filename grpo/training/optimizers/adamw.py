"""One step of torch's AdamW, for optimizers that treat only some of their parameters in another way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


def update(group: Mapping[str, Any], parameters: list[Tensor], states: Mapping[Tensor, dict[str, Tensor]]) -> None:
    """Updates these parameters of a group, which have gradients. One without state gets that of torch.optim.AdamW."""
    if not parameters:
        return
    for p in parameters:
        if not states[p]:
            step = torch.zeros((), dtype=torch.float32, device=p.device)
            states[p].update(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    adamw(
        parameters,
        [p.grad for p in parameters if p.grad is not None],
        [states[p]["exp_avg"] for p in parameters],
        [states[p]["exp_avg_sq"] for p in parameters],
        [],
        [states[p]["step"] for p in parameters],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
