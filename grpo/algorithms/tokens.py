"""The tensors that a loss uses, the normalizers of its means, and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Completion tokens of a micro-batch. All tensors are [B, T], padded on the right."""

    logprobs: Tensor  # under the policy, with gradient
    old_logprobs: Tensor  # under the policy before the updates on these samples
    ref_logprobs: Tensor | None  # under the reference
    advantages: Tensor  # constant over a completion under outcome supervision
    mask: Tensor  # 1.0 on completion tokens, else 0.0

    def without_padding(self) -> Tokens:
        """A copy with zeros where the mask is 0, so that no inf or nan in the padding reaches a loss or a gradient."""
        padding = self.mask == 0
        return Tokens(
            logprobs=self.logprobs.masked_fill(padding, 0.0),
            old_logprobs=self.old_logprobs.masked_fill(padding, 0.0),
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs.masked_fill(padding, 0.0),
            advantages=self.advantages.masked_fill(padding, 0.0),
            mask=self.mask,
        )


@dataclass(frozen=True)
class Normalizers:
    """Denominators of a whole optimizer step, so that the losses of its micro-batches add up to the step's loss."""

    sequences: int
    tokens: int  # completion tokens
    budget: int  # maximum number of tokens of a completion
    measured: int | None = None  # those of `tokens` that statistics are means over; None: all, because all are computed


def pad(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """[B, T] on `device` from B vectors of different lengths, padded on the right with 0."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device)
