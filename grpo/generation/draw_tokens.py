"""Drawing tokens from logits with random numbers specific to each completion."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo.config.common import Sampling
from grpo.model.decoding import sample_tokens, supports

CANDIDATES = 1024
"""Number of most probable tokens that top-p considers first on a CPU; all tokens are sorted only if their mass is too
small. A GPU always sorts all tokens, because the host would have to wait to read the mass."""


def uniforms_of(seeds: Sequence[int], size: int, length: int) -> Tensor:
    """Random numbers in [0, 1), one per token, for `size` completions of each of P seeds: [P * size, length]."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.cat([torch.rand(size, length, dtype=torch.float64, generator=generator) for generator in generators])


def drawing_device(device: torch.device) -> torch.device:
    """The device that draws tokens from logits on `device`: the same, except for MPS, which lacks float64 for the
    cumulative masses."""
    return torch.device("cpu") if device.type == "mps" else device


def draw_tokens(logits: Tensor, settings: Sampling, uniforms: Tensor, *, fused: bool = True) -> tuple[Tensor, Tensor]:
    """Draws one token per row of logits [B, V], by inverse transform sampling with `uniforms` [B] in [0, 1).

    Returns tokens [B] and their log-probabilities [B] before top-p. `fused`: use a CPU kernel if there is one.
    """
    if settings.temperature != 1:
        logits = logits / settings.temperature
    if settings.top_p == 1 and fused and supports(logits):
        return sample_tokens(logits, uniforms)
    largest = logits.amax(1, keepdim=True)
    masses, order = (logits - largest).exp_(), None
    total = masses.sum(1, keepdim=True)
    if settings.top_p < 1:
        masses, order = _nucleus(masses, settings.top_p * total)
    index = _inverse_cdf(masses, uniforms[:, None])
    token = index if order is None else order.gather(1, index)
    return token.squeeze(1), (logits.gather(1, token) - largest - total.log()).squeeze(1)


def _inverse_cdf(masses: Tensor, uniforms: Tensor) -> Tensor:
    """Index [B, 1] of the first entry of each row [B, V] at which the cumulative share of the mass exceeds `uniforms`
    [B, 1].

    Finds the block of entries first, then the entry, so that the cumulative sums of a whole row are never stored.
    """
    blocks = _blocks(masses)
    size = blocks.shape[2]
    of_block = blocks.sum(2)
    up_to_block = _cumulative(of_block)
    threshold = uniforms * up_to_block[:, -1:]
    block = _first_above(up_to_block, threshold)
    before = up_to_block.gather(1, block) - of_block.gather(1, block)
    entries = blocks.gather(1, block[:, :, None].expand(-1, -1, size)).squeeze(1)
    return block * size + _first_above(_cumulative(entries), threshold - before)


def in_fixed_order(masses: Tensor) -> bool:
    """Whether sums need another way to have a fixed order: cumsum on a GPU does not guarantee one."""
    return masses.is_cuda


def _blocks(masses: Tensor) -> Tensor:
    """Rows [B, V] in blocks of equal size [B, N, S], filled up with zeros."""
    rows, count = masses.shape
    size = 1 << count.bit_length() // 2  # near the square root of the count
    missing = -count % size
    return (pad(masses, (0, missing)) if missing else masses).view(rows, -1, size)


def _cumulative(masses: Tensor) -> Tensor:
    """Cumulative sums of each row [B, n], in float64."""
    return _cumulative_by_product(masses) if in_fixed_order(masses) else masses.cumsum(1, dtype=torch.float64)


def _cumulative_by_product(masses: Tensor) -> Tensor:
    """`_cumulative` with sums in a fixed order, which cumsum on a GPU does not guarantee."""
    columns = torch.arange(masses.shape[1], device=masses.device)
    return masses.double() @ (columns[:, None] <= columns).double()


def _cumulative_by_blocks(masses: Tensor) -> Tensor:
    """`_cumulative_by_product` of a whole vocabulary, for which that product would be too large: in blocks."""
    blocks = _blocks(masses)
    within = _cumulative_by_product(blocks.flatten(0, 1)).view(blocks.shape)
    of_block = within[:, :, -1]
    before = _cumulative_by_product(of_block) - of_block
    return (before[:, :, None] + within).flatten(1)[:, : masses.shape[1]]


def _first_above(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Index of each row's first entry above its threshold; never past the last entry with positive mass."""
    index = torch.searchsorted(cumulative, threshold, right=True)
    return torch.minimum(index, torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()))


def _nucleus(masses: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Masses of the most probable tokens that together hold `kept` [B, 1], in descending order with the others set to
    0, and the token ids in that order."""
    candidates = min(CANDIDATES, masses.shape[1]) if masses.device.type == "cpu" else masses.shape[1]
    descending, order = masses.topk(candidates)
    if candidates < masses.shape[1] and (descending.sum(1, keepdim=True) < kept).any():
        descending, order = masses.sort(1, descending=True)
    # A token is kept if the mass before it is below the share to keep, so the most probable one is always kept.
    cumulative = _cumulative_by_blocks(descending) if in_fixed_order(masses) else descending.cumsum(1)
    outside = cumulative - descending >= kept
    return descending.masked_fill(outside, 0), order
