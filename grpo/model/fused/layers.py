"""Fused forms of RMSNorm, the SwiGLU MLP and embeddings: fewer passes over memory, fewer saved activations.

`fuse` replaces the `forward` of modules in a loaded model; weights and names do not change. A module is replaced only
if it has exactly the expected parts and both forwards agree on a probe, so unknown modules keep transformers' own
forward. Whole decoder blocks: `grpo.model.fused.blocks`.

If a weight already has a gradient, as in every micro-batch of a step but the first, the new gradient is added to it in
place, so that no second tensor of its size exists. `torch.autograd.grad` would miss gradients added that way: use it
only for weights whose `.grad` is None.
"""

from __future__ import annotations

from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, silu

from grpo.model.cpu import kernels
from grpo.model.packed import elementwise
from grpo.model.packed.autograd import add_product, call


def fuse(model: Any) -> None:
    """Replaces the forward of known layers of `model`, in place. Adapters may be added before or after."""
    agrees: dict[type, bool] = {}
    for module in [*model.modules()]:
        for is_known, forward in ((_is_mlp, _mlp), (_is_norm, _norm), (_is_embedding, _embed)):
            if not is_known(module):
                continue
            fused, kind = MethodType(forward, module), type(module)
            if kind not in agrees:  # once per class, so that not all weights of a large model are read
                agrees[kind] = _agrees(module, fused)
            if agrees[kind]:
                module.forward = fused


def unfuse(model: Any) -> None:
    """Restores the original forward of all modules of `model`."""
    for module in model.modules():
        module.__dict__.pop("forward", None)


def is_fused(module: Any) -> bool:
    """Whether a norm or an MLP has a fused forward."""
    return getattr(module.forward, "__func__", None) in (_norm, _mlp)


def _agrees(module: nn.Module, forward: Any) -> bool:
    """Whether `forward` returns the same as the module on a few inputs."""
    weight = next(module.parameters())
    if weight.is_meta or len(signature(module.forward).parameters) != 1:
        return False
    if isinstance(module, nn.Embedding):
        probe = torch.arange(min(4, len(weight)), device=weight.device)
    else:
        probe = torch.linspace(-2, 3, 3 * weight.shape[-1], device=weight.device, dtype=weight.dtype).view(1, 3, -1)
    try:
        with torch.no_grad():
            return all_close(forward(probe), module(probe))
    except Exception:  # a module of another kind that looks like a known one
        return False


def all_close(actual: Tensor, expected: Tensor) -> bool:
    """Equality up to the rounding of `expected`'s dtype."""
    # Norms compute in float32 even for float64 weights.
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5}.get(expected.dtype, 2e-2)
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


def _is_norm(module: nn.Module) -> bool:
    own = dict(module.named_parameters())
    return [*own] == ["weight"] and own["weight"].dim() == 1 and isinstance(epsilon(module), float)


def epsilon(norm: Any) -> float | None:
    """A norm's epsilon, under either of the names that transformers uses."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _norm(self: Any, x: Tensor) -> Tensor:
    output: Tensor = call(RMSNorm, x, self.weight, epsilon(self))
    return output


class RMSNorm(torch.autograd.Function):
    """RMSNorm over the last dimension, w x / sqrt(mean x^2 + eps), in float32 (Zhang and Sennrich, 2019).

    Saves x and one number per token.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if kernels.supports_float32_or_bfloat16(x, weight):
            normed, inverse = kernels.rms_norm(x.flatten(0, -2), detached_copy(weight), eps)
            ctx.save_for_backward(x, weight, inverse)
            return normed.view(x.shape)
        normed, inverse = elementwise.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        if kernels.supports_float32_or_bfloat16(gradient, x, weight):
            of_x, of_weight = kernels.rms_norm_backward(
                gradient.flatten(0, -2), x.flatten(0, -2), detached_copy(weight), inverse
            )
            return of_x.view(x.shape), of_weight if ctx.needs_input_grad[1] else None, None
        rows = gradient.flatten(0, -2), x.flatten(0, -2)
        grad_x, grad_weight = elementwise.rms_norm_backward(*rows, weight, inverse.flatten(0, -2))
        return grad_x.view(gradient.shape), grad_weight if ctx.needs_input_grad[1] else None, None


def detached_copy(weight: Tensor) -> Tensor:
    """A copy outside the autograd graph, to be passed to a kernel. The weight itself cannot be passed: FSDP2 resizes
    its storage, which torch refuses once NumPy has shared it."""
    return weight.detach().clone()


def _is_mlp(module: Any) -> bool:
    linears: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(linear) is nn.Linear and linear.bias is None for linear in linears):
        return False
    gate, up, down = linears
    same_shapes: bool = gate.weight.shape == up.weight.shape == down.weight.t().shape
    return same_shapes and len([*module.parameters()]) == 3


def _mlp(self: Any, x: Tensor) -> Tensor:
    gate, up, down = self.gate_proj, self.up_proj, self.down_proj
    output: Tensor
    if all(type(linear) is nn.Linear for linear in (gate, up, down)):
        flat = x.flatten(0, -2)
        output = call(MLP, flat, gate.weight, up.weight, down.weight).view(x.shape)
    else:  # some have adapters
        output = down(call(_SwiGLU, gate(x), up(x)))
    return output


class MLP(torch.autograd.Function):
    """(silu(x Wg^T) * (x Wu^T)) Wd^T for x [N, H] (SwiGLU; Shazeer, 2020). Saves x and the first two products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
        gate, up = x @ gate_weight.t(), x @ up_weight.t()
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, gate_weight, up_weight, down_weight, gate, up)
        inner = kernels.swiglu(gate, up) if kernels.supports(x) else elementwise.swiglu(gate, up)
        return inner @ down_weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_weight, up_weight, down_weight, gate, up = ctx.saved_tensors
        inner, grad_gate, grad_up = _swiglu_backward(gradient @ down_weight, gate, up)
        grad_down_weight = add_product(down_weight, gradient, inner) if ctx.needs_input_grad[3] else None
        grad_gate_weight = add_product(gate_weight, grad_gate, x) if ctx.needs_input_grad[1] else None
        grad_up_weight = add_product(up_weight, grad_up, x) if ctx.needs_input_grad[2] else None
        grad_x = (grad_gate @ gate_weight).addmm_(grad_up, up_weight) if ctx.needs_input_grad[0] else None
        return grad_x, grad_gate_weight, grad_up_weight, grad_down_weight


def _swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up, recomputed, and the gradients of `gate` and `up`. May overwrite `gradient`."""
    if kernels.supports_float32_or_bfloat16(gradient, gate, up):
        return kernels.swiglu_backward(gradient, gate, up)
    return elementwise.swiglu_backward(gradient, gate, up)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up. Saves only its inputs."""

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
    if ids.device.type != "cpu":  # on other devices index_add_ sums rows in no fixed order
        return embedding(ids, self.weight, self.padding_idx)
    output: Tensor = call(_Embedding, ids, self.weight, self.padding_idx)
    return output


class _Embedding(torch.autograd.Function):
    """Embedding whose gradient is added in place to the weight's existing gradient."""

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
