"""Float32 loops over rows that read each number once, compiled by Numba.

A row's result does not depend on the number of threads. NaN stays NaN. `kernels` calls them with tensors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import prange

from grpo.model.cpu.compilation import compiled, exact, inlined, parallel_over_rows


@parallel_over_rows
def rms_norm(x: Any, weight: Any, eps: Any, normed: Any, inverse: Any) -> None:
    """See `kernels.rms_norm`."""
    for i in prange(len(x)):
        inverse[i] = _rms_norm_row(x[i], weight, eps, normed[i])


@inlined
def _rms_norm_row(x: Any, weight: Any, eps: Any, normed: Any) -> Any:
    squares = np.float32(0)
    for j in range(len(x)):
        squares += x[j] * x[j]
    inverse = np.float32(1) / np.sqrt(squares / np.float32(len(x)) + eps)
    for j in range(len(x)):
        normed[j] = x[j] * inverse * weight[j]
    return inverse


@parallel_over_rows
def add_rms_norm(x: Any, y: Any, weight: Any, eps: Any, normed: Any) -> None:
    """See `kernels.add_rms_norm`."""
    rows, width = x.shape
    for i in prange(rows):
        for j in range(width):
            x[i, j] += y[i, j]
        _rms_norm_row(x[i], weight, eps, normed[i])


GRADIENT_BLOCK = 64
"""Rows whose contributions to a weight's gradient are summed together."""


@parallel_over_rows
def rms_norm_backward(grad_output: Any, x: Any, weight: Any, inverse: Any, grad_x: Any, grad_weight: Any) -> None:
    """See `kernels.rms_norm_backward`."""
    rows, width = x.shape
    for block in prange(grad_weight.shape[0]):
        total = grad_weight[block]
        total[:] = np.float32(0)
        for i in range(block * GRADIENT_BLOCK, min(rows, block * GRADIENT_BLOCK + GRADIENT_BLOCK)):
            r = inverse[i]
            projection = np.float32(0)
            for j in range(width):
                product = grad_output[i, j] * x[i, j]
                projection += product * weight[j]
                total[j] += product * r
            # With n = x r: r (w g - n mean(w g n)).
            projection *= r * r * r / np.float32(width)
            for j in range(width):
                grad_x[i, j] = grad_output[i, j] * weight[j] * r - x[i, j] * projection


@parallel_over_rows
def rotary(x: Any, cos: Any, sin: Any, sign: Any, rotated: Any) -> None:
    """See `kernels.rotary`."""
    rows, heads, width = rotated.shape
    half = width // 2
    for i in prange(rows):
        for h in range(heads):
            for j in range(half):
                a, b = x[i, h, j], x[i, h, j + half]
                rotated[i, h, j] = a * cos[i, j] + sign * b * sin[i, j]
                rotated[i, h, j + half] = b * cos[i, j + half] - sign * a * sin[i, j + half]


@parallel_over_rows
def swiglu(gate: Any, up: Any, start: Any, output: Any) -> None:
    """See `kernels.swiglu`."""
    rows, width = output.shape
    for i in prange(rows):
        a, b = gate[i], up[i, start:]
        for j in range(width):
            output[i, j] = a[j] * _sigmoid(a[j]) * b[j]


@parallel_over_rows
def swiglu_backward(grad_output: Any, gate: Any, up: Any, output: Any, grad_gate: Any, grad_up: Any) -> None:
    """See `kernels.swiglu_backward`."""
    rows, width = grad_output.shape
    for i in prange(rows):
        for j in range(width):
            sigmoid = _sigmoid(gate[i, j])
            silu = gate[i, j] * sigmoid
            output[i, j] = silu * up[i, j]
            grad_up[i, j] = silu * grad_output[i, j]
            grad_gate[i, j] = grad_output[i, j] * up[i, j] * (sigmoid + silu * (np.float32(1) - sigmoid))


@parallel_over_rows
def sum_rows(x: Any, order: Any, ends: Any, total: Any) -> None:
    """See `kernels.sum_rows`."""
    rows, width = total.shape
    for i in prange(rows):
        sums = total[i]
        sums[:] = np.float32(0)
        for slot in order[(ends[i - 1] if i else 0) : ends[i]]:
            for j in range(width):
                sums[j] += x[slot, j]


@parallel_over_rows
def decode_attention(
    q: Any,
    k: Any,
    v: Any,
    keys: Any,
    values: Any,
    positions: Any,
    prompt_outputs: Any,
    prompt_lse: Any,
    prompt_row: Any,
    scale: Any,
    outputs: Any,
) -> None:
    """See `kernels.decode_attention`."""
    rows, heads, width = q.shape
    groups = k.shape[1]
    for i in prange(rows):
        count = positions[i] + 1
        scores, query, output = np.empty(count, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
        for g in range(groups):
            own_keys, own_values = keys[i, g], values[i, g]
            for j in range(width):
                own_keys[count - 1, j] = k[i, g, j]
                own_values[count - 1, j] = v[i, g, j]
            for r in range(heads // groups):
                head = g * (heads // groups) + r
                for j in range(width):
                    query[j] = q[i, head, j] * scale
                for t in range(count):
                    score = np.float32(0)
                    for j in range(width):
                        score += query[j] * own_keys[t, j]
                    scores[t] = score
                top = max(_largest(scores), prompt_lse[prompt_row[i], r, g])
                total = share = _exp(prompt_lse[prompt_row[i], r, g] - top)
                for t in range(count):
                    scores[t] = _exp(scores[t] - top)
                # A separate loop, because the one above vectorizes only without the sum.
                for t in range(count):
                    total += scores[t]
                for j in range(width):
                    output[j] = share * prompt_outputs[prompt_row[i], r, g, j]
                _add_rows(output, scores, own_values)
                for j in range(width):
                    outputs[i, head, j] = output[j] / total


_CHUNK = 64
"""Number of tokens whose mass is summed before the sampled token is searched among them."""


@parallel_over_rows
def sample_tokens(logits: Any, maxima: Any, uniforms: Any, tokens: Any, logprobs: Any) -> None:
    """See `kernels.sample_tokens`."""
    rows, count = logits.shape
    chunks = -(-count // _CHUNK)
    for i in prange(rows):
        row, top = logits[i], maxima[i]
        chunk_masses = np.empty(chunks, np.float64)
        total, last = 0.0, 0
        for b in range(chunks):
            block = row[b * _CHUNK : (b + 1) * _CHUNK]
            mass = np.float32(0)
            for j in range(len(block)):
                mass += _exp_or_zero(block[j] - top)
            chunk_masses[b] = mass
            total += chunk_masses[b]
            if mass > 0:
                last = b
        target, before, b = uniforms[i] * total, 0.0, 0
        while b < last and before + chunk_masses[b] <= target:
            before += chunk_masses[b]
            b += 1
        # Rounding must not lead past the last entry with positive mass.
        token = b * _CHUNK
        for j in range(b * _CHUNK, min(count, (b + 1) * _CHUNK)):
            mass = _exp_or_zero(row[j] - top)
            if mass > 0:
                token = j
                before += mass
                if before > target:
                    break
        tokens[i] = token
        logprobs[i] = row[token] - top - np.float32(np.log(total))


@inlined
def _add_rows(total: Any, weights: Any, rows: Any) -> None:
    """Adds weights [T] @ rows [>= T, D] to total [D], four rows at a time to save memory traffic."""
    count, fours = len(weights), len(weights) // 4 * 4
    for t in range(0, fours, 4):
        a, b, c, d = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        for j in range(len(total)):
            total[j] += (a * rows[t, j] + b * rows[t + 1, j]) + (c * rows[t + 2, j] + d * rows[t + 3, j])
    for t in range(fours, count):
        for j in range(len(total)):
            total[j] += weights[t] * rows[t, j]


@partial(compiled, fastmath=True)
def _largest(x: Any) -> Any:
    largest = x[0]
    for i in range(len(x)):
        largest = max(largest, x[i])
    return largest


@exact
def _exp_or_zero(x: Any) -> Any:
    return _exp(x) if x > np.float32(-87) else np.float32(0)


@exact
def _sigmoid(x: Any) -> Any:
    return np.float32(1) / (np.float32(1) + _exp(-x))


@exact
def _exp(x: Any) -> Any:
    """e^x accurate to two units in the last place: 2^n e^r with |r| up to ln 2 / 2; the series for e^r ends at r^7 /
    7!.

    LLVM vectorizes this; `np.exp` would be a library call per number.
    """
    if x < np.float32(-87):
        x = np.float32(-87)
    if x > np.float32(88):
        x = np.float32(88)
    n = np.floor(x * np.float32(1.442695041) + np.float32(0.5))
    # ln 2 in two parts, the first short enough that its product with n is exact
    r = (x - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
    series = np.float32(1 / 720) + r * np.float32(1 / 5040)
    series = np.float32(1 / 24) + r * (np.float32(1 / 120) + r * series)
    series = np.float32(1 / 2) + r * (np.float32(1 / 6) + r * series)
    series = np.float32(1) + r * (np.float32(1) + r * series)
    return series * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
