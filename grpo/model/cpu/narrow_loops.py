"""Loops for bfloat16 tensors where torch would read and write memory for each step of a formula: rows are widened to
float32, computed as in `loops`, and rounded to the nearest.

bfloat16 numbers are passed as their bits, the upper half of a float32 number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from grpo.model.cpu.compilation import exact, parallel_over_rows
from grpo.model.cpu.loops import GRADIENT_BLOCK, _rms_norm_row, _sigmoid


@parallel_over_rows
def rms_norm(x: Any, weight: Any, eps: Any, normed: Any, inverse: Any) -> None:
    """See `kernels.rms_norm`; the weight and the inverse are float32."""
    rows, width = x.shape
    for i in prange(rows):
        wide, output = np.empty(width, np.float32), np.empty(width, np.float32)
        _widen(x[i], wide)
        inverse[i] = _rms_norm_row(wide, weight, eps, output)
        _narrow(output, normed[i])


@parallel_over_rows
def rms_norm_backward(grad_output: Any, x: Any, weight: Any, inverse: Any, grad_x: Any, grad_weight: Any) -> None:
    """See `kernels.rms_norm_backward`; the weight, the inverse and the weight's gradient are float32."""
    rows, width = x.shape
    for block in prange(grad_weight.shape[0]):
        total, gradient, row = grad_weight[block], np.empty(width, np.float32), np.empty(width, np.float32)
        total[:] = np.float32(0)
        for i in range(block * GRADIENT_BLOCK, min(rows, block * GRADIENT_BLOCK + GRADIENT_BLOCK)):
            _widen(grad_output[i], gradient)
            _widen(x[i], row)
            r = inverse[i]
            projection = np.float32(0)
            for j in range(width):
                product = gradient[j] * row[j]
                projection += product * weight[j]
                total[j] += product * r
            projection *= r * r * r / np.float32(width)  # see `loops.rms_norm_backward`
            for j in range(width):
                gradient[j] = gradient[j] * weight[j] * r - row[j] * projection
            _narrow(gradient, grad_x[i])


@parallel_over_rows
def swiglu_backward(grad_output: Any, gate: Any, up: Any, output: Any, grad_gate: Any, grad_up: Any) -> None:
    """See `kernels.swiglu_backward`."""
    rows, width = grad_output.shape
    for i in prange(rows):
        gradient, a, b = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
        inner, of_up = np.empty(width, np.float32), np.empty(width, np.float32)
        _widen(grad_output[i], gradient)
        _widen(gate[i], a)
        _widen(up[i], b)
        for j in range(width):
            sigmoid = _sigmoid(a[j])
            silu = a[j] * sigmoid
            inner[j] = silu * b[j]
            of_up[j] = silu * gradient[j]
            gradient[j] = gradient[j] * b[j] * (sigmoid + silu * (np.float32(1) - sigmoid))
        _narrow(inner, output[i])
        _narrow(of_up, grad_up[i])
        _narrow(gradient, grad_gate[i])


@exact
def _widen(bits: Any, wide: Any) -> None:
    """float32 numbers [N] of bfloat16 bits [>= N]."""
    halves = wide.view(np.uint32)
    for j in range(len(wide)):
        halves[j] = np.uint32(bits[j]) << np.uint32(16)


@exact
def _narrow(wide: Any, bits: Any) -> None:
    """Bits of the bfloat16 numbers [N] nearest to float32 ones [N]; of two equally near the one that ends in 0. NaN
    stays NaN."""
    whole = wide.view(np.uint32)
    for j in range(len(wide)):
        number = whole[j]
        rounded = (number + np.uint32(0x7FFF) + ((number >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        bits[j] = np.uint16(0x7FC0) if wide[j] != wide[j] else np.uint16(rounded)
