"""Direct preference optimization (Rafailov et al., arXiv 2305.18290; DSM A.1.4), and pairs for it from groups."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def log_ratio(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, length_average: bool) -> Tensor:
    """log(pi/ref) of whole completions, [B, T] -> [B]: the sum over tokens or, as in DSM, the mean."""
    total = ((logprobs - ref_logprobs).masked_fill(mask == 0, 0.0)).sum(1)
    return total / mask.sum(1).clamp(min=1) if length_average else total


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    *,
    beta: float,
    length_average: bool,
    pairs: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-log sigma(margin), averaged over pairs (DPO eq. 7), with the margin beta log(pi/ref)(chosen) -
    beta log(pi/ref)(rejected).

    All tensors are [B, T] (T may differ between chosen and rejected); masks are 1.0 on completion tokens. `pairs` is
    the number in the whole optimizer step, so that the losses of its micro-batches add up. Also returns detached
    statistics, which add up in the same way: `accuracy` (share of pairs with a positive margin) and `margin` (nats).
    """
    chosen = log_ratio(chosen_logprobs, ref_chosen_logprobs, chosen_mask, length_average)
    rejected = log_ratio(rejected_logprobs, ref_rejected_logprobs, rejected_mask, length_average)
    margin = beta * (chosen - rejected)
    stats = {"accuracy": (margin > 0).sum() / pairs, "margin": margin.detach().sum() / pairs}
    return -logsigmoid(margin).sum() / pairs, stats


def pair_up(rewards: Tensor) -> list[tuple[int, int]]:
    """Returns pairs (chosen, rejected) from rewards [P, G], as indices into the P * G completions.

    Within each group the best is paired with the worst, the second best with the second worst, and so on while their
    rewards differ. Ties keep the group's order; if G is odd, the middle completion is omitted.
    """
    pairs = []
    size = rewards.shape[1]
    for group, row in enumerate(rewards.tolist()):
        order = sorted(range(size), key=lambda i: -row[i])
        for better, worse in zip(order[: size // 2], reversed(order), strict=False):
            if row[better] > row[worse]:
                pairs.append((group * size + better, group * size + worse))
    return pairs
