"""One decoding step of a Llama-style model on a CPU in float32: the next logits of many sequences, one token each.

The blocks compute the same as `grpo.model.fused.blocks` without calling its modules: queries, keys and values are one
product, and nothing is saved for a backward pass. This matters because rollouts spend most of their time reading
weights and launching thousands of small operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from grpo.distributed.threads import adapt_threads
from grpo.model.cpu import kernels
from grpo.model.cpu.prepacked_linear import PrepackedLinear
from grpo.model.fused.blocks import has_fused_blocks
from grpo.model.fused.layers import detached_copy, epsilon, is_fused
from grpo.model.packed.scores import ScoreOptions

Attend = Callable[[int, Tensor, Tensor, Tensor, ScoreOptions], Tensor]
"""Signature of `grpo.model.packed.attention.Layout.attend`."""

MAX_CONCATENATED = 2**18
"""Matrices with the same input are concatenated up to this total number of weights: for such small products, the
overhead of a call exceeds the cost of the copy."""


def can_decode(backbone: Any, head: Any) -> bool:
    """Whether `DecodeStep` supports every part of the model."""
    weight = head.weight if type(head) is nn.Linear else None
    if weight is None or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    if not has_fused_blocks(backbone):
        return False
    # With other rotary embeddings the angles also depend on the length of the sequence.
    by_position_alone = backbone.rotary_emb.rope_type not in ("dynamic", "longrope")
    return by_position_alone and is_fused(backbone.norm) and all(_is_supported(block) for block in backbone.layers)


def _is_supported(block: Any) -> bool:
    attention, mlp = block.self_attn, block.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    linears = (*qkv, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    norms = [module for name in ("q_norm", "k_norm") if (module := getattr(attention, name, None)) is not None]
    parts = [block.input_layernorm, block.post_attention_layernorm, mlp, *norms]
    all_or_no_biases = len({linear.bias is None for linear in qkv}) == 1
    return all(type(linear) is nn.Linear for linear in linears) and all(map(is_fused, parts)) and all_or_no_biases


class DecodeStep:
    """Computes decoding steps for as long as the model's weights do not change."""

    def __init__(self, backbone: Any, head: nn.Linear, prepacked_rows: int):
        """`prepacked_rows`: number of sequences to prepack the weights for (`grpo.model.cpu.prepacked_linear`).
        Prepacked weights are also used for fewer sequences, if more than half as many. 0: do not prepack."""
        self.embed, self.angles = backbone.embed_tokens, _Angles(backbone.rotary_emb, head.weight)
        self.blocks = [_Block(block) for block in backbone.layers]
        norms = (*(block.input_layernorm for block in backbone.layers), backbone.norm)
        self.norms = [_weight_and_epsilon(norm) for norm in norms]
        self.head = _Linears([head])
        self.prepacked_rows = prepacked_rows
        if prepacked_rows:
            self._prepack()

    @torch.no_grad()
    def _prepack(self) -> None:
        linears = [part for block in self.blocks for part in block.linears]
        # One scratch tensor for all: freeing one per layer would leave holes between the prepacked weights.
        scratch = torch.empty(max(part.size for part in linears))
        for part in (*linears, self.head):
            part.prepacked = PrepackedLinear(part.weights, self.prepacked_rows, scratch)

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits [n, V] after tokens [n] at positions [n]."""
        count = len(ids)
        x = self.embed(ids)
        adapt_threads(x.device, x.dtype)
        cos, sin = self.angles(positions)
        # Fewer rows are padded to the prepacked number; at half of it or less that would not pay off.
        rows = self.prepacked_rows if self.prepacked_rows < 2 * count <= 2 * self.prepacked_rows else count
        x = _pad_rows(x, rows)
        normed = kernels.rms_norm(x, *self.norms[0])[0]
        for block, norm in zip(self.blocks, self.norms[1:], strict=True):
            normed = kernels.add_rms_norm(x, block(x, normed, count, cos, sin, attend), *norm)
        return self.head(normed)[:count]


class _Angles:
    """Rotary cosines and sines by position, [n, 1, D] each, from a table that grows as needed."""

    def __init__(self, rotary: Any, like: Tensor):
        self.rotary, self.like = rotary, like
        self.table = like.new_empty(2, 0, 1, 0)

    def __call__(self, positions: Tensor) -> tuple[Tensor, ...]:
        if (longest := int(positions.max())) >= self.table.shape[1]:
            table_positions = torch.arange(2 * longest + 1, device=positions.device)
            self.table = torch.cat(self.rotary(self.like, table_positions[None]))[:, :, None]
        return self.table[:, positions].unbind()


class _Block:
    """One decoder block."""

    def __init__(self, block: Any):
        attention, mlp = block.self_attn, block.mlp
        self.layer, self.width, self.options = attention.layer_idx, attention.head_dim, ScoreOptions(attention.scaling)
        self.mlp_norm = _weight_and_epsilon(block.post_attention_layernorm)
        self.qkv = _Linears([attention.q_proj, attention.k_proj, attention.v_proj])
        self.heads = attention.q_proj.out_features // self.width
        self.rotated = self.heads + attention.k_proj.out_features // self.width  # heads of queries and keys
        self.q_norm = attention.q_norm.forward if hasattr(attention, "q_norm") else None
        self.k_norm = attention.k_norm.forward if hasattr(attention, "k_norm") else None
        self.out = _Linears([attention.o_proj])
        self.gate_up = _Linears([mlp.gate_proj, mlp.up_proj])
        self.down = _Linears([mlp.down_proj])
        self.linears = (self.qkv, self.out, self.gate_up, self.down)

    def __call__(self, x: Tensor, normed: Tensor, count: int, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The MLP's output [N, H]; adds the attention's output to x [N, H] in place.

        `normed`: x after the block's first norm. The first `count` of the N rows are sequences, the others padding.
        """
        states = self.qkv(normed).view(x.shape[0], -1, self.width)[:count]
        v = states[:, self.rotated :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = states[:, : self.heads], states[:, self.heads : self.rotated]
            states = torch.cat([self.q_norm(q), self.k_norm(k)], 1)
        qk = kernels.rotary(states, cos, sin, self.rotated, -1)
        attended = attend(self.layer, qk[:, : self.heads], qk[:, self.heads :], v, self.options)
        normed = kernels.add_rms_norm(x, self.out(_pad_rows(attended.flatten(1), x.shape[0])), *self.mlp_norm)
        return self.down(kernels.swiglu_fused(self.gate_up(normed)))


def _weight_and_epsilon(norm: Any) -> tuple[Tensor, float]:
    eps = epsilon(norm)
    assert eps is not None  # `is_fused` holds for every norm here
    return detached_copy(norm.weight), eps


class _Linears:
    """x W^T + b of one or more linear layers with the same input, side by side."""

    def __init__(self, linears: Sequence[nn.Linear]):
        self.weights = [linear.weight.detach() for linear in linears]
        self.size = sum(weight.numel() for weight in self.weights)
        if len(linears) > 1 and self.size <= MAX_CONCATENATED:
            self.weights = [torch.cat(self.weights)]
        ends = [*accumulate((len(weight) for weight in self.weights), initial=0)]
        self.parts = [(weight.t(), slice(*ends)) for weight, ends in zip(self.weights, pairwise(ends), strict=True)]
        self.out_features = ends[-1]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.prepacked: PrepackedLinear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.prepacked is not None and x.shape[0] == self.prepacked.rows:
            y = self.prepacked.product(x)
        elif len(self.parts) == 1:
            y = torch.mm(x, self.parts[0][0])
        else:
            y = x.new_empty(x.shape[0], self.out_features)
            for weight, columns in self.parts:
                torch.mm(x, weight, out=y[:, columns])
        return y if self.bias is None else y.add_(self.bias)


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[0] == rows else pad(x, (0, 0, 0, rows - x.shape[0]))
