"""AdamW whose two moments take one byte per weight each, with bitsandbytes (Dettmers et al., arXiv 2110.02861).

A moment is stored as 8-bit codes in blocks of 256 numbers with one scale each. Each row of a matrix starts a new block.
FSDP2 shards by rows, so the codes do not depend on the number of processes, and checkpoints can be read with any
number. Tensor parallelism divides rows, too, within blocks, and settings that combine them are refused. bitsandbytes's
own classes have blocks that span rows, and do not support sharded weights. torchao's support them, but their blocks
span rows, too, and they compile each weight shape with a C++ compiler in the first step.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes.functional as bnb
import torch
import torch.distributed.tensor as dt
from torch import Tensor
from torch.nn.functional import pad

from grpo.distributed.fsdp import local
from grpo.training.optimizers import adamw

BLOCK = 256
"""Block size of bitsandbytes's kernels, in numbers."""
SMALLEST = 4096
"""Tensors with fewer numbers keep float32 moments, as in the paper: they take little memory, and biases and norms are
sensitive.
"""
AT_ONCE = 2**20
"""Numbers updated at a time. On a CPU each needs temporary float32 copies."""
DEVICES = {"cpu", "cuda"}


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with decoupled weight decay, like torch.optim.AdamW.

    State of a matrix [..., R, C]: `exp_avg` and `exp_avg_sq`, codes [..., R, C]; `exp_avg_scale` and
    `exp_avg_sq_scale`, float32 [..., R, ceil(C / 256)]; each sharded like the matrix. Small tensors have the state of
    torch's AdamW.
    """

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})
        # By device: the code values of both moments, and the first moment's code for zero.
        self._codes: dict[torch.device, tuple[Tensor, Tensor, int]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            learning = [p for p in group["params"] if p.grad is not None]
            adamw.update(group, [p for p in learning if not _has_codes(p)], self.state)
            for p in filter(_has_codes, learning):
                if not self.state[p]:
                    self.state[p].update(_first_state(p))
                self.state[p]["step"] += 1
                self._update(group, p)

    def _update(self, group: dict[str, Any], p: Tensor) -> None:
        assert p.grad is not None
        state = self.state[p]
        grad = p.grad.contiguous()
        kept = [p, grad, state["exp_avg"], state["exp_avg_sq"], state["exp_avg_scale"], state["exp_avg_sq_scale"]]
        rows = [local(tensor).view(-1, tensor.shape[-1]) for tensor in kept]
        count = max(1, AT_ONCE // p.shape[-1])
        for start in range(0, len(rows[0]), count):
            self._update_rows(group, int(state["step"].item()), *(table[start : start + count] for table in rows))

    def _update_rows(
        self,
        group: dict[str, Any],
        step: int,
        p: Tensor,
        grad: Tensor,
        m: Tensor,
        v: Tensor,
        m_scale: Tensor,
        v_scale: Tensor,
    ) -> None:
        """Updates rows [R, C] in place; rows whose length is not a multiple of the block are padded for the kernel."""
        if p.device not in self._codes:
            signed, positive = bnb.create_dynamic_map(signed=True), bnb.create_dynamic_map(signed=False)
            self._codes[p.device] = signed.to(p.device), positive.to(p.device), int(signed.abs().argmin())
        signed, positive, zero = self._codes[p.device]
        short = -p.shape[1] % BLOCK
        whole = (p, grad, m, v)
        if short:
            whole = (pad(p, (0, short)), pad(grad, (0, short)), pad(m, (0, short), value=zero), pad(v, (0, short)))
        beta1, beta2 = group["betas"]
        bnb.optimizer_update_8bit_blockwise(
            "adam",
            whole[1],
            whole[0],
            whole[2],
            whole[3],
            beta1,
            beta2,
            0.0,  # used by other optimizers only, like the next argument
            0.0,
            group["eps"],
            step,
            group["lr"],
            signed,
            positive,
            m_scale.view(-1),
            v_scale.view(-1),
            group["weight_decay"],
        )
        if short:
            for mine, filled in zip((p, m, v), (whole[0], whole[2], whole[3]), strict=True):
                mine.copy_(filled[:, : p.shape[1]])


def _has_codes(p: Tensor) -> bool:
    """Whether `p` has 8-bit moments. Depends on the unsharded size, so all processes agree. Short rows would be mostly
    padding."""
    return p.ndim >= 2 and p.numel() >= SMALLEST and p.shape[-1] >= BLOCK // 2


def _first_state(p: Tensor) -> dict[str, Tensor]:
    scales = (*p.shape[:-1], -(-p.shape[-1] // BLOCK))
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(p, dtype=torch.uint8),
        "exp_avg_sq": torch.zeros_like(p, dtype=torch.uint8),
        "exp_avg_scale": _zeros(p, scales),
        "exp_avg_sq_scale": _zeros(p, scales),
    }


def _zeros(p: Tensor, shape: tuple[int, ...]) -> Tensor:
    if isinstance(p, dt.DTensor):
        return dt.zeros(shape, dtype=torch.float32, device_mesh=p.device_mesh, placements=p.placements)
    return torch.zeros(shape, dtype=torch.float32, device=p.device)
