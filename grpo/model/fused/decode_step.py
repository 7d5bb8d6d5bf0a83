"""A model's next logits for one token of each of many sequences, in float32 on a CPU, with as few operations as can be.

The blocks are those of `grpo.model.fused.blocks`; here their modules are not called, queries, keys and values are one
product, and nothing is kept. Small operations by the thousand are what a rollout's time is made of besides reading the
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from grpo.model.cpu import kernels
from grpo.model.cpu.prepacked_linear import PrepackedLinear
from grpo.model.fused.blocks import taken_over
from grpo.model.fused.layers import apart, epsilon, is_fused

Attend = Callable[[int, Tensor, Tensor, Tensor, float | None], Tensor]
"""As `grpo.model.packed.attention.Layout.attend`."""

JOINED = 2**18
"""Numbers up to which weights that see the same states are copied into one: calls cost more than so small products."""


def can_decode(trunk: Any, head: Any) -> bool:
    """Whether `Blocks` knows all parts of the model."""
    weight = head.weight if type(head) is nn.Linear else None
    if weight is None or weight.device.type != "cpu" or weight.dtype != torch.float32 or not taken_over(trunk):
        return False
    steady = trunk.rotary_emb.rope_type not in ("dynamic", "longrope")  # elsewhere angles depend on position alone
    return steady and is_fused(trunk.norm) and all(_is_plain(block) for block in trunk.layers)


def _is_plain(block: Any) -> bool:
    attention, mlp = block.self_attn, block.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    linears = (*qkv, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    norms = [module for name in ("q_norm", "k_norm") if (module := getattr(attention, name, None)) is not None]
    parts = [block.input_layernorm, block.post_attention_layernorm, mlp, *norms]
    alike = len({linear.bias is None for linear in qkv}) == 1
    return all(type(linear) is nn.Linear for linear in linears) and all(map(is_fused, parts)) and alike


class Blocks:
    """The model in as many steps as its weights stay what they are. They are packed (`grpo.model.cpu.prepacked_linear`)
    for `packed_rows` sequences, which serves down to more than half as many; 0: they are not."""

    def __init__(self, trunk: Any, head: nn.Linear, packed_rows: int):
        self.embed, self.angles = trunk.embed_tokens, _Angles(trunk.rotary_emb, head.weight)
        self.blocks = [_Block(block) for block in trunk.layers]
        self.norms = [_parts(norm) for norm in (*(block.input_layernorm for block in trunk.layers), trunk.norm)]
        self.head = _Products([head])
        self.packed_rows = packed_rows
        if packed_rows:
            self._pack()

    @torch.no_grad()
    def _pack(self) -> None:
        products = [part for block in self.blocks for part in block.products]
        # The same room for all: freed pieces between what stays would leave holes.
        scratch = torch.empty(max(part.numbers for part in products))
        for part in (*products, self.head):
            part.packed = PrepackedLinear(part.weights, self.packed_rows, scratch)

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits [n, V] after tokens [n] at positions [n]."""
        count = len(ids)
        x = self.embed(ids)
        cos, sin = self.angles(positions)
        # Packed weights take fewer rows by filling up; fewer than half would take as long as all of them.
        filled = self.packed_rows if self.packed_rows < 2 * count <= 2 * self.packed_rows else count
        x = _filled(x, filled)
        normed = kernels.rms_norm(x, *self.norms[0])[0]
        for block, norm in zip(self.blocks, self.norms[1:], strict=True):
            normed = kernels.add_rms_norm(x, block(x, normed, count, cos, sin, attend), *norm)
        return self.head(normed)[:count]


class _Angles:
    """Cosines and sines of positions, [n, 1, D] each, out of a table that grows as positions do."""

    def __init__(self, rotary: Any, like: Tensor):
        self.rotary, self.like = rotary, like
        self.table = like.new_empty(2, 0, 1, 0)

    def __call__(self, positions: Tensor) -> tuple[Tensor, ...]:
        if (longest := int(positions.max())) >= self.table.shape[1]:
            everywhere = torch.arange(2 * longest + 1, device=positions.device)
            self.table = torch.cat(self.rotary(self.like, everywhere[None]))[:, :, None]
        return self.table[:, positions].unbind()


class _Block:
    def __init__(self, block: Any):
        attention, mlp = block.self_attn, block.mlp
        self.layer, self.width, self.scale = attention.layer_idx, attention.head_dim, attention.scaling
        self.between = _parts(block.post_attention_layernorm)
        self.qkv = _Products([attention.q_proj, attention.k_proj, attention.v_proj])
        self.heads = attention.q_proj.out_features // self.width
        self.turned = self.heads + attention.k_proj.out_features // self.width  # heads of queries and keys
        self.of_queries = attention.q_norm.forward if hasattr(attention, "q_norm") else None
        self.of_keys = attention.k_norm.forward if hasattr(attention, "k_norm") else None
        self.out = _Products([attention.o_proj])
        self.gate_and_up = _Products([mlp.gate_proj, mlp.up_proj])
        self.down = _Products([mlp.down_proj])
        self.products = (self.qkv, self.out, self.gate_and_up, self.down)

    def __call__(self, x: Tensor, normed: Tensor, count: int, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """What is to be added to x [N, H], normed before; the first `count` rows are sequences. x grows by what
        attention adds."""
        states = self.qkv(normed).view(x.shape[0], -1, self.width)[:count]
        v = states[:, self.turned :]
        if self.of_queries is not None and self.of_keys is not None:
            queries, keys = states[:, : self.heads], states[:, self.heads : self.turned]
            states = torch.cat([self.of_queries(queries), self.of_keys(keys)], 1)
        q_and_k = kernels.rotary(states, cos, sin, self.turned, -1)
        seen = attend(self.layer, q_and_k[:, : self.heads], q_and_k[:, self.heads :], v, self.scale)
        normed = kernels.add_rms_norm(x, self.out(_filled(seen.flatten(1), x.shape[0])), *self.between)
        return self.down(kernels.swiglu_fused(self.gate_and_up(normed)))


def _parts(norm: Any) -> tuple[Tensor, float]:
    eps = epsilon(norm)
    assert eps is not None  # `is_fused`
    return apart(norm.weight), eps


class _Products:
    """x W^T + b of some linear layers, side by side."""

    def __init__(self, linears: Sequence[nn.Linear]):
        self.weights = [linear.weight.detach() for linear in linears]
        self.numbers = sum(weight.numel() for weight in self.weights)
        if len(linears) > 1 and self.numbers <= JOINED:
            self.weights = [torch.cat(self.weights)]
        ends = [*accumulate((len(weight) for weight in self.weights), initial=0)]
        self.parts = [(weight.t(), slice(*ends)) for weight, ends in zip(self.weights, pairwise(ends), strict=True)]
        self.out = ends[-1]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.packed: PrepackedLinear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None and x.shape[0] == self.packed.rows:
            y = self.packed.product(x)
        elif len(self.parts) == 1:
            y = torch.mm(x, self.parts[0][0])
        else:
            y = x.new_empty(x.shape[0], self.out)
            for weight, columns in self.parts:
                torch.mm(x, weight, out=y[:, columns])
        return y if self.bias is None else y.add_(self.bias)


def _filled(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[0] == rows else pad(x, (0, 0, 0, rows - x.shape[0]))
