"""Fused forward passes of whole Llama-style decoder blocks and of the backbone's loop over them.

A block computes x + attention(norm(x)), then x + MLP(norm(x)). Llama, Mistral, Qwen2 and Qwen3 have this form in
transformers; Qwen3 also normalizes queries and keys. Saved for the backward pass: x before each norm, the normed x,
rotated queries and keys, values, and what the MLP saves.
"""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3Model

from grpo.distributed.threads import adapt_threads
from grpo.model.cpu import kernels
from grpo.model.fused.layers import all_close
from grpo.model.packed import elementwise
from grpo.model.packed.attention import NAME
from grpo.model.packed.autograd import add_product, call
from grpo.model.packed.packing import pack
from grpo.model.packed.scores import ScoreOptions

BACKBONES = {
    LlamaModel: LlamaDecoderLayer,
    MistralModel: MistralDecoderLayer,
    Qwen2Model: Qwen2DecoderLayer,
    Qwen3Model: Qwen3DecoderLayer,
}
"""Classes of backbones that can be fused -> classes of their blocks."""


def fuse_blocks(model: Any) -> None:
    """Replaces the forward of `model`'s backbone and of its blocks, in place, if their classes are known and the fused
    first block agrees with the original."""
    for backbone in [*model.modules()]:
        layer = BACKBONES.get(type(backbone))
        if layer is None or not all(type(block) is layer and not _has_window(block) for block in backbone.layers):
            continue
        if _agrees(backbone):
            _replace_forward(backbone)


def _has_window(block: Any) -> bool:
    """Whether a block has sliding-window attention, which only transformers' own block computes."""
    attention = block.self_attn
    return getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)) is not None


def _replace_forward(backbone: Any) -> None:
    backbone.forward = MethodType(_backbone, backbone)
    for block in backbone.layers:
        block.forward = MethodType(_block, block)


def has_fused_blocks(backbone: Any) -> bool:
    """Whether `fuse_blocks` replaced the backbone's forward."""
    return getattr(backbone.forward, "__func__", None) is _backbone


def _agrees(backbone: Any) -> bool:
    """Whether the fused and the original first block return the same."""
    weight = backbone.embed_tokens.weight
    if weight.is_meta or backbone.config._attn_implementation != NAME or not len(backbone.layers):
        return False
    packed = pack([[0, 1, 2]], [[]], weight.device)
    x = torch.linspace(-2, 3, 3 * weight.shape[1], device=weight.device, dtype=weight.dtype).view(1, 3, -1)
    with torch.no_grad():
        inputs = dict(attention_mask=None, position_embeddings=backbone.rotary_emb(x, packed.positions))
        block = backbone.layers[0]
        fused, own = _block(block, x, layout=packed.attention, **inputs), block(x, layout=packed.attention, **inputs)
        return all_close(fused, own)


def _backbone(
    self: Any,
    input_ids: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    layout: Any = None,
    use_cache: bool | None = None,
    **others: Any,
) -> Any:
    """Forward pass of a backbone. Calls that do not come from `hidden_states` go to transformers' own forward."""
    if layout is None or others or input_ids is None:
        others |= dict(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask)
        return type(self).forward(self, use_cache=use_cache, **others)
    x = self.embed_tokens(input_ids)
    adapt_threads(x.device, x.dtype)
    rotation = self.rotary_emb(x, position_ids)
    for block in self.layers:
        x = block(x, position_embeddings=rotation, layout=layout)
    return SimpleNamespace(last_hidden_state=self.norm(x))


def _block(
    self: Any, hidden_states: Tensor, *, position_embeddings: Any = None, layout: Any = None, **others: Any
) -> Tensor:
    """Forward pass of a block, [1, N, H] -> [1, N, H]."""
    attention, mlp = self.self_attn, self.mlp
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    output: Tensor
    if layout is None or not all(type(linear) is nn.Linear for linear in linears):  # some have adapters
        inputs = dict(position_embeddings=position_embeddings, **others)
        output = type(self).forward(self, hidden_states, **inputs, **({} if layout is None else {"layout": layout}))
        return output
    x = hidden_states[0]
    weights = [linear.weight for linear in linears[:3]]
    biases = [linear.bias for linear in linears[:3]]
    q, k, v = call(_QKVProjection, self.input_layernorm(x), *weights, *biases)
    q, k, v = (states.view(len(x), -1, attention.head_dim) for states in (q, k, v))
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    cos, sin = (angles[0, :, None] for angles in position_embeddings)
    q, k = call(Rotary, q, cos, sin), call(Rotary, k, cos, sin)
    attended = layout.attend(attention.layer_idx, q, k, v, ScoreOptions(attention.scaling)).flatten(1)
    x = call(_AddProjection, x, attended, linears[3].weight)
    if linears[3].bias is not None:
        x = x + linears[3].bias
    # Not a view: FSDP2 hooks into a block's output.
    output = x[None] + mlp(self.post_attention_layernorm(x))[None]
    return output


class _QKVProjection(torch.autograd.Function):
    """x W^T + b for three W and b, where b may be None. The three gradients of x are accumulated in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights_and_biases: Any) -> tuple[Tensor, ...]:
        weights, biases = weights_and_biases[:3], weights_and_biases[3:]
        ctx.save_for_backward(x, *weights)
        products = [x @ weight.t() for weight in weights]
        return tuple(y if b is None else y.add_(b) for y, b in zip(products, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad
        grad_x = None
        if needed[0]:
            grad_x = gradients[0] @ weights[0]
            for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
                grad_x.addmm_(gradient, weight)
        pairs = [*zip(gradients, weights, strict=True)]
        grad_weights = [add_product(w, g, x) if needed[1 + i] else None for i, (g, w) in enumerate(pairs)]
        grad_biases = [g.sum(0) if needed[4 + i] else None for i, g in enumerate(gradients)]
        return grad_x, *grad_weights, *grad_biases


class Rotary(torch.autograd.Function):
    """Rotary position embedding of x [N, H, D]: halves (a, b) become (a cos - b sin, b cos + a sin) (Su et al.,
    2021)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, sin, 1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    if kernels.supports(x, cos):
        return kernels.rotary(x, cos, sin, x.shape[1], sign)
    return elementwise.rotate(x, cos, sin, sign)


class _AddProjection(torch.autograd.Function):
    """x + y W^T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(y, weight)
        return torch.addmm(x, y, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        y, weight = ctx.saved_tensors
        grad_y = gradient @ weight if ctx.needs_input_grad[1] else None
        grad_weight = add_product(weight, gradient, y) if ctx.needs_input_grad[2] else None
        return gradient if ctx.needs_input_grad[0] else None, grad_y, grad_weight
