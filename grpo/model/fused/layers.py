"""Leaner forms of what a loaded language model computes: fewer passes over memory, less kept for the gradient.

Weights, names and values stay as they are. A module is taken over only if it has the known parts and, asked, says what
it said before; whatever is unknown stays as transformers has it. Known are RMSNorm, the MLP with SiLU gate and
embeddings of any model, and whole blocks (`grpo.model.fused.blocks`).

Where a weight has a gradient already, as in all micro-batches of a step but the first, a product is added to it in
place, so that no second gradient of its size exists. `torch.autograd.grad` would not see that: it is for weights
whose `.grad` is None.
"""

from __future__ import annotations

from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, silu

from grpo.model.cpu import kernels
from grpo.model.packed.autograd import add_product, call


def fuse(model: Any) -> None:
    """Take over what is known of `model`, in place. Adapters may be put on it before or after."""
    agree: dict[type, bool] = {}
    for module in [*model.modules()]:
        for known, forward in ((_is_mlp, _mlp), (_is_norm, _norm), (_is_embedding, _embed)):
            if not known(module):
                continue
            ours, kind = MethodType(forward, module), type(module)
            if kind not in agree:  # asked once a class: a large model need not be read for this
                agree[kind] = _agree(module, ours)
            if agree[kind]:
                module.forward = ours


def is_fused(module: Any) -> bool:
    """Whether a norm or an MLP was taken over."""
    return getattr(module.forward, "__func__", None) in (_norm, _mlp)


def _agree(module: nn.Module, forward: Any) -> bool:
    """Whether `forward` says the same as the module, on a few numbers."""
    weight = next(module.parameters())
    if weight.is_meta or len(signature(module.forward).parameters) != 1:
        return False
    if isinstance(module, nn.Embedding):
        probe = torch.arange(min(4, len(weight)), device=weight.device)
    else:
        probe = torch.linspace(-2, 3, 3 * weight.shape[-1], device=weight.device, dtype=weight.dtype).view(1, 3, -1)
    with torch.no_grad():
        return same(forward(probe), module(probe))


def same(found: Tensor, expected: Tensor) -> bool:
    """Up to rounding."""
    close = {torch.float64: 1e-6, torch.float32: 1e-5}.get(expected.dtype, 2e-2)  # of float64 too, norms are in float32
    return torch.allclose(found, expected, rtol=close, atol=close * expected.abs().max().item())


def _is_norm(module: nn.Module) -> bool:
    own = dict(module.named_parameters())
    return [*own] == ["weight"] and own["weight"].dim() == 1 and isinstance(epsilon(module), float)


def epsilon(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _norm(self: Any, x: Tensor) -> Tensor:
    return call(RMSNorm, x, self.weight, epsilon(self))


class RMSNorm(torch.autograd.Function):
    """w x / sqrt(mean x^2 + eps), the root in float32 (Zhang and Sennrich, 2019). Keeps x and one number a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if kernels.supports(x, weight):
            normed, inverse = kernels.rms_norm(x.flatten(0, -2), apart(weight), eps)
            ctx.save_for_backward(x, weight, inverse)
            return normed.view(x.shape)
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = torch.rsub(length.square_(), eps, alpha=-1 / x.shape[-1]).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        normed = (wide * inverse).to(x.dtype)
        return normed.mul_(weight) if weight.dtype == x.dtype else normed * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        if kernels.supports(gradient, x, weight):
            found = kernels.rms_norm_backward(gradient.flatten(0, -2), x.flatten(0, -2), apart(weight), inverse)
            return found[0].view(x.shape), found[1] if ctx.needs_input_grad[1] else None, None
        x, inverse = x.flatten(0, -2).float(), inverse.flatten(0, -2)
        wide = gradient.reshape(x.shape).float()
        products = wide * x
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (inverse.t() @ products).squeeze(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            # With n = x inverse: inverse (w g - n mean(w g n)).
            along = (products @ weight.float()[:, None]).mul_(inverse.pow(3)).div_(-x.shape[1])
            of_x = (wide * weight.float()).mul_(inverse).addcmul_(x, along).to(gradient.dtype).view(gradient.shape)
        return of_x, of_weight, None


def apart(weight: Tensor) -> Tensor:
    """A copy: FSDP2 resizes a weight's storage, which torch refuses once it has been an array."""
    return weight.detach().clone()


def _is_mlp(module: Any) -> bool:
    linears: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(linear) is nn.Linear and linear.bias is None for linear in linears):
        return False
    gate, up, down = linears
    shapes = gate.weight.shape == up.weight.shape == down.weight.t().shape
    return shapes and len([*module.parameters()]) == 3


def _mlp(self: Any, x: Tensor) -> Tensor:
    gate, up, down = self.gate_proj, self.up_proj, self.down_proj
    if all(type(linear) is nn.Linear for linear in (gate, up, down)):
        flat = x.flatten(0, -2)
        return call(MLP, flat, gate.weight, up.weight, down.weight).view(x.shape)
    return down(call(_Gated, gate(x), up(x)))  # adapters are on some


class MLP(torch.autograd.Function):
    """(silu(x Wg^T) * (x Wu^T)) Wd^T (SwiGLU; Shazeer, 2020), for x [N, H]. Keeps x and the first two products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gated, raised = x @ gate.t(), x @ up.t()
        keeps = any(ctx.needs_input_grad)
        if keeps:
            ctx.save_for_backward(x, gate, up, down, gated, raised)
        inner = kernels.swiglu(gated, raised) if kernels.supports(x) else silu(gated, inplace=not keeps).mul_(raised)
        return inner @ down.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, gated, raised = ctx.saved_tensors
        inner, of_gated, of_raised = _gate_backward(gradient @ down, gated, raised)
        of_down = add_product(down, gradient, inner) if ctx.needs_input_grad[3] else None
        of_gate = add_product(gate, of_gated, x) if ctx.needs_input_grad[1] else None
        of_up = add_product(up, of_raised, x) if ctx.needs_input_grad[2] else None
        of_x = (of_gated @ gate).addmm_(of_raised, up) if ctx.needs_input_grad[0] else None
        return of_x, of_gate, of_up, of_down


def _gate_backward(gradient: Tensor, gated: Tensor, raised: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gated) raised again, and the gradients of both. `gradient` is overwritten."""
    if kernels.supports(gradient):
        return kernels.swiglu_backward(gradient, gated, raised)
    activated = silu(gated)
    inner, of_raised = activated * raised, activated.mul_(gradient)
    return inner, torch.ops.aten.silu_backward(gradient.mul_(raised), gated), of_raised


class _Gated(torch.autograd.Function):
    """silu(gate) * up, which is not kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(gradient * up, gate), silu(gate).mul_(gradient)


def _is_embedding(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None and not (module.sparse or module.scale_grad_by_freq)


def _embed(self: Any, ids: Tensor) -> Tensor:
    if ids.device.type != "cpu":  # sums of rows in place would come in any order there
        return embedding(ids, self.weight, self.padding_idx)
    return call(_Embedding, ids, self.weight, self.padding_idx)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.padding = padding
        return embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ids, weight = ctx.saved_tensors
        if weight.grad is None or not weight.is_leaf:
            padding = -1 if ctx.padding is None else ctx.padding
            return None, torch.ops.aten.embedding_dense_backward(gradient, ids, len(weight), padding, False), None
        if ctx.padding is not None:
            gradient = gradient.masked_fill((ids == ctx.padding)[..., None], 0)
        weight.grad.index_add_(0, ids.flatten(), gradient.flatten(0, -2).to(weight.grad.dtype))
        return None, None, None
