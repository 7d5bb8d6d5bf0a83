"""Muon: momentum whose updates are made orthogonal, for the matrices of hidden layers; AdamW for all other weights.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). The scale is that of Liu et
al., "Muon is Scalable for LLM Training" (arXiv 2502.16982): an update is as large as AdamW's, so one learning rate
serves all weights. Matrices of one shape are made orthogonal together. torch.optim.Muon takes them one by one, which is
slower for a small model on a CPU.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from grpo.training.optimizers import adamw

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the polynomial that brings singular values near 1 (Jordan et al.): odd powers 1, 3 and 5."""
ITERATIONS = 5
MOMENTUM = 0.95
STACKED = 2**27
"""Most weights that are made orthogonal at once: some five copies of them in float32 are in memory meanwhile."""
UPDATE_SIZE = 0.2
"""Root mean square of an update, in units of the learning rate: about AdamW's."""


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """The trained parameters of a model: its hidden layers' matrices, and the others, such as embeddings and the head,
    also that of a reward model."""
    heads = _output_embeddings(model), getattr(model, "score", None)
    ends = [m for m in model.modules() if isinstance(m, nn.Embedding) or any(m is head for head in heads)]
    not_hidden = {id(p) for module in ends for p in module.parameters()}
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            hidden = p.ndim == 2 and id(p) not in not_hidden and not name.endswith("lm_head.weight")
            (matrices if hidden else others).append(p)
    return [{"params": matrices, "matrices": True}, {"params": others, "matrices": False}]


def _output_embeddings(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


class Muon(torch.optim.Optimizer):
    """Trains the groups of `groups_of`. A matrix has one moment, `momentum`; others have the state of torch's AdamW."""

    def __init__(
        self,
        groups: list[Any],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        eps: float = 1e-8,
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            learning = [p for p in group["params"] if p.grad is not None]
            if group["matrices"]:
                self._update_matrices(group, learning)
            else:
                adamw.update(group, learning, self.state)

    def _update_matrices(self, group: dict[str, Any], matrices: list[Tensor]) -> None:
        by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for p in matrices:
            by_shape[min(p.shape, p.shape[::-1])].append(p)
        for p in matrices:
            self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(_grad(p), 1 - MOMENTUM)
        for shape, parameters in by_shape.items():
            scale = group["lr"] * UPDATE_SIZE * max(shape) ** 0.5
            together = max(1, STACKED // parameters[0].numel())
            for some in (parameters[start : start + together] for start in range(0, len(parameters), together)):
                looks_ahead = [_grad(p).lerp(self.state[p]["momentum"], MOMENTUM) for p in some]  # Nesterov
                wide = torch.stack([update if update.shape == shape else update.T for update in looks_ahead])
                for p, update in zip(some, orthogonal(wide), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(update if p.shape == shape else update.T, alpha=scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices [B, R, C], R <= C, with the singular vectors of the given ones and singular values of 0.7 to 1.2
    (Newton-Schulz)."""
    a, b, c = COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + torch.baddbmm(b * square, square, square, alpha=c) @ x
    return x


def _grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad
