"""CPU kernels for computations that torch has no single operation for: in float32, some in bfloat16 too.

Each is a loop in `loops`, compiled at a machine's first call and cached on disk. Tensors are passed as NumPy arrays, so
their storage cannot be resized afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.model.cpu import loops, narrow_loops

_LOOPS: Mapping[torch.dtype, Any] = {torch.float32: loops, torch.bfloat16: narrow_loops}


def supports(*tensors: Tensor) -> bool:
    """Whether all kernels apply: float32 on a CPU."""
    return _are(torch.float32, tensors)


def supports_float32_or_bfloat16(*tensors: Tensor) -> bool:
    """Whether `rms_norm`, its backward pass and `swiglu_backward` apply: one of these on a CPU, all alike."""
    return any(_are(dtype, tensors) for dtype in _LOOPS)


def _are(dtype: torch.dtype, tensors: Sequence[Tensor]) -> bool:
    return all(tensor.device.type == "cpu" and tensor.dtype == dtype for tensor in tensors)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm over the rows of x [N, H]: w x / sqrt(mean x^2 + eps), and 1 / sqrt(mean x^2 + eps) [N] in float32."""
    x = x.contiguous()
    normed, inverse = torch.empty_like(x), x.new_empty(len(x), dtype=torch.float32)
    _LOOPS[x.dtype].rms_norm(*_arrays(x, weight.float()), np.float32(eps), *_arrays(normed, inverse))
    return normed, inverse


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of x + y, [N, H] each. Stores the sum in x."""
    normed = torch.empty_like(x)
    loops.add_rms_norm(*_arrays(x, y, weight), np.float32(eps), *_arrays(normed))
    return normed


def rms_norm_backward(grad_output: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x [N, H] and of the weight [H]."""
    grad_output, x = grad_output.contiguous(), x.contiguous()
    grad_x = torch.empty_like(x)
    grad_weight = x.new_empty(-(-len(x) // loops.GRADIENT_BLOCK), x.shape[1], dtype=torch.float32)
    _LOOPS[x.dtype].rms_norm_backward(*_arrays(grad_output, x, weight.float(), inverse, grad_x, grad_weight))
    return grad_x, grad_weight.sum(0).to(weight.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, heads: int, sign: float) -> Tensor:
    """Rotary position embedding of the first `heads` of x [N, H, D].

    For sign -1, halves (a, b) become (a cos - b sin, b cos + a sin); sign 1 is the inverse.
    """
    x = x.contiguous()
    rotated = x.new_empty(len(x), heads, x.shape[2])
    loops.rotary(*_arrays(x, cos.flatten(1), sin.flatten(1)), np.float32(sign), *_arrays(rotated))
    return rotated


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [N, I] each."""
    output = torch.empty_like(gate)
    loops.swiglu(*_arrays(gate, up), 0, *_arrays(output))
    return output


def swiglu_fused(gate_up: Tensor) -> Tensor:
    """`swiglu` of gate and up side by side, [N, 2 I]."""
    output = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    loops.swiglu(*_arrays(gate_up, gate_up), output.shape[1], *_arrays(output))
    return output


def swiglu_backward(grad_output: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output of `swiglu`, recomputed, and the gradients of `gate` and `up`."""
    output, grad_gate, grad_up = (torch.empty_like(grad_output) for _ in range(3))
    _LOOPS[gate.dtype].swiglu_backward(*_arrays(grad_output, gate, up, output, grad_gate, grad_up))
    return output, grad_gate, grad_up


def sum_rows(x: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Sums [N, ...] of consecutive groups of rows of x [S, ...]; group i is order[ends[i - 1] : ends[i]]."""
    total = x.new_empty(len(ends), *x.shape[1:])
    loops.sum_rows(*_arrays(x.flatten(1).contiguous(), order, ends, total.flatten(1)))
    return total


def decode_attention(
    qkv: tuple[Tensor, Tensor, Tensor],
    cache: Sequence[Tensor],
    positions: Tensor,
    prompt: Sequence[Tensor],
    scale: float,
) -> Tensor:
    """Attention outputs [n, H, D] of one new token in each of n rows, over the row's prompt and generated tokens.

    `qkv`: queries [n, H, D], keys and values [n, Hkv, D] of the new tokens. They are written to `positions` [n] of
    `cache`, keys and values [N, Hkv, T, D]; the queries attend to all tokens up to there. `prompt`: precomputed
    attention over the prompts: outputs [s, r, Hkv, D], logsumexp [s, r, Hkv], and each row's index among the s, [n].
    """
    outputs = qkv[0].new_empty(qkv[0].shape)
    loops.decode_attention(*_arrays(*qkv, *cache, positions, *prompt), np.float32(scale), *_arrays(outputs))
    return outputs


def sample_tokens(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row of logits [B, V] by inversion, [B], and its log-probability, [B].

    `uniforms` [B] (float64, in [0, 1)): the token is the first whose cumulative probability exceeds it. Rounding never
    selects a token of zero probability.
    """
    tokens, logprobs = torch.empty_like(uniforms, dtype=torch.long), torch.empty_like(uniforms, dtype=torch.float32)
    loops.sample_tokens(*_arrays(logits.contiguous(), logits.amax(1), uniforms, tokens, logprobs))
    return tokens, logprobs


def _arrays(*tensors: Tensor) -> list[np.ndarray]:
    """The tensors as arrays; bfloat16 numbers, which NumPy does not have, as their bits."""
    plain = (tensor.detach() for tensor in tensors)
    return [x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy() for x in plain]
