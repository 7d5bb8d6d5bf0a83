"""Whole transformer blocks of the Llama form, and the loop over them, with as few operations as they need.

x + attention(norm(x)), then x + MLP(norm(x)): Llama, Mistral, Qwen2 and Qwen3 are of this form in transformers; the
last with norms on queries and keys. What a block keeps for the gradient is x before each norm, the normed x, rotated
queries and keys, values, and what the MLP keeps.
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

from grpo.model.cpu import kernels
from grpo.model.fused.layers import same
from grpo.model.packed.attention import NAME
from grpo.model.packed.autograd import add_product, call
from grpo.model.packed.packing import pack

TRUNKS = {
    LlamaModel: LlamaDecoderLayer,
    MistralModel: MistralDecoderLayer,
    Qwen2Model: Qwen2DecoderLayer,
    Qwen3Model: Qwen3DecoderLayer,
}


def fuse_blocks(model: Any) -> None:
    """Take over the trunk of `model` and its blocks, in place, if they are of a known class and say what they said."""
    for trunk in [*model.modules()]:
        layer = TRUNKS.get(type(trunk))
        if layer is None or not all(type(block) is layer and not _looks_back(block) for block in trunk.layers):
            continue
        if _agree(trunk):
            _take_over(trunk)


def _looks_back(block: Any) -> bool:
    """Whether a block has a window; `grpo.model.packed.attention.attend` says what is not supported."""
    attention = block.self_attn
    return getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)) is not None


def _take_over(trunk: Any) -> None:
    trunk.forward = MethodType(_trunk, trunk)
    for block in trunk.layers:
        block.forward = MethodType(_block, block)


def taken_over(trunk: Any) -> bool:
    return getattr(trunk.forward, "__func__", None) is _trunk


def _agree(trunk: Any) -> bool:
    """Whether the first block says the same both ways."""
    weight = trunk.embed_tokens.weight
    if weight.is_meta or trunk.config._attn_implementation != NAME or not len(trunk.layers):
        return False
    packed = pack([[0, 1, 2]], [[]], weight.device)
    x = torch.linspace(-2, 3, 3 * weight.shape[1], device=weight.device, dtype=weight.dtype).view(1, 3, -1)
    with torch.no_grad():
        given = dict(attention_mask=None, position_embeddings=trunk.rotary_emb(x, packed.positions))
        block = trunk.layers[0]
        return same(_block(block, x, layout=packed.attention, **given), block(x, layout=packed.attention, **given))


def _trunk(
    self: Any,
    input_ids: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    layout: Any = None,
    use_cache: bool | None = None,
    **others: Any,
) -> Any:
    if layout is None or others or input_ids is None:
        given = dict(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)
        return type(self).forward(self, **given, **others)
    x = self.embed_tokens(input_ids)
    rotation = self.rotary_emb(x, position_ids)
    for block in self.layers:
        x = block(x, position_embeddings=rotation, layout=layout)
    return SimpleNamespace(last_hidden_state=self.norm(x))


def _block(
    self: Any, hidden_states: Tensor, *, position_embeddings: Any = None, layout: Any = None, **others: Any
) -> Tensor:
    """[1, N, H] to the same."""
    attention, mlp = self.self_attn, self.mlp
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    if layout is None or not all(type(linear) is nn.Linear for linear in linears):  # adapters are on some
        given = dict(position_embeddings=position_embeddings, **others)
        return type(self).forward(self, hidden_states, **given, **({} if layout is None else {"layout": layout}))
    x = hidden_states[0]
    weights = [linear.weight for linear in linears[:3]]
    biases = [linear.bias for linear in linears[:3]]
    q, k, v = call(_Products, self.input_layernorm(x), *weights, *biases)
    q, k, v = (states.view(len(x), -1, attention.head_dim) for states in (q, k, v))
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    cos, sin = (angles[0, :, None] for angles in position_embeddings)
    q, k = call(Rotated, q, cos, sin), call(Rotated, k, cos, sin)
    seen = layout.attend(attention.layer_idx, q, k, v, attention.scaling).flatten(1)
    x = call(_Added, x, seen, linears[3].weight)
    if linears[3].bias is not None:
        x = x + linears[3].bias
    # No view: FSDP2 hooks into what a block returns.
    return x[None] + mlp(self.post_attention_layernorm(x))[None]


class _Products(torch.autograd.Function):
    """x W^T + b for three W and b; b may be None. Their gradients for x are added up in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> tuple[Tensor, ...]:
        weights, biases = given[:3], given[3:]
        ctx.save_for_backward(x, *weights)
        found = [x @ weight.t() for weight in weights]
        return tuple(y if b is None else y.add_(b) for y, b in zip(found, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad
        of_x = None
        if needed[0]:
            of_x = gradients[0] @ weights[0]
            for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
                of_x.addmm_(gradient, weight)
        given = [*zip(gradients, weights, strict=True)]
        of_weights = [add_product(w, g, x) if needed[1 + i] else None for i, (g, w) in enumerate(given)]
        of_biases = [g.sum(0) if needed[4 + i] else None for i, g in enumerate(gradients)]
        return of_x, *of_weights, *of_biases


class Rotated(torch.autograd.Function):
    """x [N, H, D] turned by its position: halves (a, b) to (a cos - b sin, b cos + a sin) (Su et al., 2021)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, sin, 1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    if kernels.supports(x, cos):
        return kernels.rotary(x, cos, sin, x.shape[1], sign)
    half = x.shape[-1] // 2
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin[..., :half], value=sign)
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:], value=-sign)
    return turned


class _Added(torch.autograd.Function):
    """x + y W^T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(y, weight)
        return torch.addmm(x, y, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        y, weight = ctx.saved_tensors
        of_y = gradient @ weight if ctx.needs_input_grad[1] else None
        of_weight = add_product(weight, gradient, y) if ctx.needs_input_grad[2] else None
        return gradient if ctx.needs_input_grad[0] else None, of_y, of_weight
