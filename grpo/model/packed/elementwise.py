"""Elementwise parts of fused layers and of softmaxes in plain PyTorch. On a GPU each is compiled into one kernel.

Otherwise every operation reads and writes its tensors by itself, and an update spends about as long on that as on
matrix products (docs/gpu.md). Sums are in float32 or wider, and results in the dtype of the inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from grpo.model.packed.products import NARROW

logger = logging.getLogger(__name__)

LEAST_ELEMENTS = 2**18
"""Size of the first tensor from which compiled kernels are used: below it the time to launch a kernel counts, and a
small model should not wait seconds for a compiler."""


def _compiled_on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(x: Tensor, *others: Any) -> Any:
        return (_compile(function) if _compiles(x) else function)(x, *others)

    return run


def _compiles(x: Tensor) -> bool:
    plain = type(x) in (Tensor, torch.nn.Parameter) and not torch._C._len_torch_function_stack()
    return x.is_cuda and plain and x.numel() >= LEAST_ELEMENTS and _has_compiler()


@cache
def _has_compiler() -> bool:
    """Whether this machine can compile kernels: Triton needs a C compiler, which small images lack."""
    try:
        torch.compile(lambda x: x.sigmoid() * 2)(torch.zeros(8, device="cuda"))
    except Exception as error:  # any part of the compiler may be missing
        logger.warning(
            "GPU kernels cannot be compiled here, so updates are slower: %s", str(error).strip().split("\n")[0]
        )
        return False
    return True


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # With and without gradients, in inference mode, for each rank of x: torch.compile takes eight such variants, and
    # runs further ones slowly.
    torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in NARROW else x


@_compiled_on_gpu
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension of x [..., H]: w x / sqrt(mean x^2 + eps), and 1 / sqrt(mean x^2 + eps)
    [..., 1] in float32."""
    wide = x.float()
    inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * inverse).to(x.dtype) * weight, inverse


@_compiled_on_gpu
def rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x [N, H] and of the weight [H] of `rms_norm`."""
    gradient_wide, normed = gradient.float(), x.float() * inverse
    weighted = gradient_wide * weight.float()
    projection = (weighted * normed).mean(-1, keepdim=True)
    grad_x = (weighted - normed * projection) * inverse
    return grad_x.to(x.dtype), (gradient_wide * normed).sum(0).to(weight.dtype)


@_compiled_on_gpu
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return silu(gate) * up


@_compiled_on_gpu
def swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up, recomputed, and the gradients of `gate` and `up`."""
    wide, wide_up, wide_gate = _wide(gradient), _wide(up), _wide(gate)
    share = wide_gate.sigmoid()
    activated = wide_gate * share
    grad_gate = wide * wide_up * (share + activated * (1 - share))
    inner, grad_up = activated * wide_up, wide * activated
    return inner.to(gate.dtype), grad_gate.to(gate.dtype), grad_up.to(up.dtype)


@_compiled_on_gpu
def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotary position embedding of x [N, H, D]: for sign -1, halves (a, b) become (a cos - b sin, b cos + a sin); sign
    1 is the inverse."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    first = a * cos[..., :half] + sign * b * sin[..., :half]
    return torch.cat([first, b * cos[..., half:] - sign * a * sin[..., half:]], -1)


@_compiled_on_gpu
def softmax_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at `targets` [N], and the softmax's logsumexp [N], for logits [N, V]."""
    scaled = logits / temperature
    largest = scaled.amax(1, keepdim=True)
    logsumexp = (scaled - largest).exp().sum(1).log() + largest.squeeze(1)
    return logits.gather(1, targets[:, None]).squeeze(1) / temperature - logsumexp, logsumexp


@_compiled_on_gpu
def logits_gradient(
    logits: Tensor, targets: Tensor, logsumexp: Tensor, gradient: Tensor, temperature: float, dtype: torch.dtype
) -> Tensor:
    """Gradient of the logits [N, V], from that of the log-probabilities of `softmax_logprobs` [N]: (onehot - softmax)
    gradient / temperature."""
    probabilities = (logits / temperature - logsumexp[:, None]).exp()
    columns = torch.arange(logits.shape[1], device=logits.device)
    chosen = (columns == targets[:, None]).to(logits.dtype)
    return ((chosen - probabilities) * (gradient / temperature)[:, None]).to(dtype)
