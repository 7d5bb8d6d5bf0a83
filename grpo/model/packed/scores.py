"""What a layer does to its attention scores (scale, window, softcap, sinks), and a reference implementation of
attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import causal_mask_function

from grpo.model.packed.ordered_gradients import with_ordered_gradients
from grpo.model.packed.products import NARROW

# On recent GPUs torch prefers cuDNN's attention. Its backward pass sums in no fixed order, without saying so, and it
# makes a plan for every new shape, of which packed sequences have many. vLLM switches it off, too, when imported.
torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass(frozen=True)
class VisibleTokens:
    """The earlier tokens that a layer attends to, if not all of them."""

    sees: Callable[..., Any]  # (row, head, position of the query, position of the key) -> bool, as in transformers
    reach: int | None  # sequences of at most this many tokens are seen completely; None: unknown

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether the tokens at positions `queries` see those at positions `keys`. The shapes are broadcast
        together."""
        first = queries.new_zeros(())
        seen: Tensor = self.sees(first, first, queries, keys)
        return seen


@dataclass(frozen=True)
class ScoreOptions:
    """How a layer turns queries and keys into attention weights."""

    scale: float
    window: VisibleTokens | None = None
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [H]: score of an additional key without a value

    def window_in(self, longest: int) -> VisibleTokens | None:
        """The window, if it hides any token in sequences of `longest` tokens; else None."""
        whole = self.window is None or (self.window.reach is not None and longest <= self.window.reach)
        return None if whole else self.window

    def is_plain(self, longest: int) -> bool:
        """Whether the weights are softmax(scale q k) over all earlier tokens."""
        return self.softcap is None and self.sinks is None and self.window_in(longest) is None


def window_of(*, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> VisibleTokens | None:
    """Mask implementation registered with transformers: returns the rule of a layer's mask instead of a tensor."""
    return None if mask_function is causal_mask_function else VisibleTokens(mask_function, local_size)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, mask: Tensor) -> Tensor:
    """Attention [R, H, L, D] by its definition, with scores in float32. `mask` [..., L, K]: True for visible keys.

    Softcaps: Gemma 2 (arXiv 2408.00118). Sinks: a key without a value takes a share of each softmax (gpt-oss).
    """
    if options.softcap is None and options.sinks is None:
        return _attention(q, k, v, mask, options.scale, causal=False)
    k, v = _of_each_head(q, k, v)
    scores = (q.float() @ k.float().transpose(-1, -2)) * options.scale
    if options.softcap is not None:
        scores = (scores / options.softcap).tanh() * options.softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


def causal_attention(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, longest: int) -> Tensor:
    """Causal attention [R, H, L, D] of the last L of K tokens, q [R, H, L, D], over all K, k and v [R, Hkv, K, D].

    The last query sees all keys, the one before it all but the last, and so on, limited by the layer's window.
    """
    queries, keys = q.shape[2], k.shape[2]
    if options.is_plain(longest):
        bias: Any = causal_lower_right(queries, keys)
        return with_ordered_gradients(_attention(q, k, v, bias, options.scale, causal=True))
    positions = torch.arange(keys, device=q.device)
    query_positions = positions[keys - queries :, None]
    mask = positions <= query_positions
    if (window := options.window_in(longest)) is not None:
        mask = mask & window.mask(query_positions, positions)
    return with_ordered_gradients(masked_attention(q, k, v, options, mask))


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Any, scale: float, causal: bool) -> Tensor:
    """torch's own attention. `causal`: whether the bias is torch's causal one, and no mask."""
    dtype = q.dtype
    if q.device.type == "cpu" and dtype in NARROW:  # the backward pass takes three times as long in bfloat16
        q, k, v = q.float(), k.float(), v.float()
    if q.device.type == "cuda" and not (causal and dtype in NARROW):
        # Flash attention takes neither masks nor float32, and the memory-efficient one no heads that share keys: what
        # is left would keep the scores of all pairs of tokens.
        k, v = _of_each_head(q, k, v)
    shared = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=shared).to(dtype)


def _of_each_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [R, Hkv, K, D] of each head of q [R, H, L, D]: [R, H, K, D]."""
    shared = q.shape[1] // k.shape[1]
    return k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
