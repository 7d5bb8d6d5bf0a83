"""What torch has no one operation for on a CPU, in float32: loops that read each number once, compiled by Numba.

Each is compiled when a process first calls it and is kept on disk for the next. A row's result does not depend on the
number of threads. NaN stays NaN. What is given becomes an array, so that its storage cannot be resized any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor


def _compiled(function: Any, **options: Any) -> Any:
    try:
        return njit(cache=True, error_model="numpy", **options)(function)
    except RuntimeError:  # neither beside this file nor in the user's cache is there a place to keep it
        return njit(error_model="numpy", **options)(function)


_in_any_order = {"reassoc", "contract", "arcp", "nsz"}  # of sums, so that several numbers are added at a time
_exactly = partial(_compiled, fastmath={"contract"})
_inner = partial(_compiled, fastmath=_in_any_order)

_loops = threading.Lock()
"""Numba's own threads, used where there is no OpenMP, end a process in which two callers want them at a time."""
_threads = threading.local()


def _over_rows(function: Any) -> Callable[..., None]:
    compiled = _compiled(function, parallel=True, fastmath=_in_any_order)

    def loop(*arguments: Any) -> None:
        with _loops:
            _use_as_many_threads_as_torch()
            compiled(*arguments)

    return loop


def _use_as_many_threads_as_torch() -> None:
    """In each thread that calls a loop; not before: whoever has started Numba's threads cannot fork (`grpo.warm`)."""
    count = torch.get_num_threads()
    if getattr(_threads, "count", None) != count:
        most: Any = numba.config
        numba.set_num_threads(min(count, most.NUMBA_NUM_THREADS))
        if torch.get_num_threads() != count:  # OpenMP is both's, and Numba starts as many threads as there are cores
            torch.set_num_threads(count)
        _threads.count = count


def serve(*tensors: Tensor) -> bool:
    return all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """w x / sqrt(mean x^2 + eps) for x [N, H], and the inverse of the root, [N]."""
    x = x.contiguous()
    normed, inverse = torch.empty_like(x), x.new_empty(len(x))
    _norm(*_arrays(x, weight), np.float32(eps), *_arrays(normed, inverse))
    return normed, inverse


@_over_rows
def _norm(x: Any, weight: Any, eps: Any, normed: Any, inverse: Any) -> None:
    for i in prange(len(x)):
        inverse[i] = _norm_row(x[i], weight, eps, normed[i])


@_inner
def _norm_row(x: Any, weight: Any, eps: Any, normed: Any) -> Any:
    squares = np.float32(0)
    for j in range(len(x)):
        squares += x[j] * x[j]
    inverse = np.float32(1) / np.sqrt(squares / np.float32(len(x)) + eps)
    for j in range(len(x)):
        normed[j] = x[j] * inverse * weight[j]
    return inverse


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norm` of x + y, [N, H] each, which x becomes."""
    normed = torch.empty_like(x)
    _add_norm(*_arrays(x, y, weight), np.float32(eps), *_arrays(normed))
    return normed


@_over_rows
def _add_norm(x: Any, y: Any, weight: Any, eps: Any, normed: Any) -> None:
    rows, width = x.shape
    for i in prange(rows):
        for j in range(width):
            x[i, j] += y[i, j]
        _norm_row(x[i], weight, eps, normed[i])


_BLOCK = 64
"""Rows whose part of a weight's gradient is summed up in one."""


def norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x [N, H] and of the weight [H]."""
    gradient, x = gradient.contiguous(), x.contiguous()
    of_x = torch.empty_like(x)
    of_weight = x.new_empty(-(-len(x) // _BLOCK), x.shape[1])
    _norm_backward(*_arrays(gradient, x, weight, inverse, of_x, of_weight))
    return of_x, of_weight.sum(0)


@_over_rows
def _norm_backward(gradient: Any, x: Any, weight: Any, inverse: Any, of_x: Any, of_weight: Any) -> None:
    rows, width = x.shape
    for block in prange(of_weight.shape[0]):
        total = of_weight[block]
        total[:] = np.float32(0)
        for i in range(block * _BLOCK, min(rows, block * _BLOCK + _BLOCK)):
            r = inverse[i]
            along = np.float32(0)
            for j in range(width):
                product = gradient[i, j] * x[i, j]
                along += product * weight[j]
                total[j] += product * r
            # With n = x r: r (w g - n mean(w g n)).
            along *= r * r * r / np.float32(width)
            for j in range(width):
                of_x[i, j] = gradient[i, j] * weight[j] * r - x[i, j] * along


def turn(x: Tensor, cos: Tensor, sin: Tensor, heads: int, sign: float) -> Tensor:
    """The first `heads` of x [N, H, D]: halves (a, b) to (a cos - b sin, b cos + a sin), for sign -1."""
    x = x.contiguous()
    turned = x.new_empty(len(x), heads, x.shape[2])
    _turn(*_arrays(x, cos.flatten(1), sin.flatten(1)), np.float32(sign), *_arrays(turned))
    return turned


@_over_rows
def _turn(x: Any, cos: Any, sin: Any, sign: Any, turned: Any) -> None:
    rows, heads, width = turned.shape
    half = width // 2
    for i in prange(rows):
        for h in range(heads):
            for j in range(half):
                a, b = x[i, h, j], x[i, h, j + half]
                turned[i, h, j] = a * cos[i, j] + sign * b * sin[i, j]
                turned[i, h, j + half] = b * cos[i, j + half] - sign * a * sin[i, j + half]


def gate(gated: Tensor, raised: Tensor) -> Tensor:
    """silu(gated) raised, [N, I] each."""
    inner = torch.empty_like(gated)
    _gate(*_arrays(gated, raised), 0, *_arrays(inner))
    return inner


def gate_halves(both: Tensor) -> Tensor:
    """`gate` of two that are side by side, [N, 2 I]."""
    inner = both.new_empty(len(both), both.shape[1] // 2)
    _gate(*_arrays(both, both), inner.shape[1], *_arrays(inner))
    return inner


@_over_rows
def _gate(gated: Any, raised: Any, start: Any, inner: Any) -> None:
    rows, width = inner.shape
    for i in prange(rows):
        a, b = gated[i], raised[i, start:]
        for j in range(width):
            inner[i, j] = a[j] * _sigmoid(a[j]) * b[j]


def gate_backward(gradient: Tensor, gated: Tensor, raised: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `gate` gave, again, and the gradients of `gated` and `raised`."""
    inner, of_gated, of_raised = (torch.empty_like(gradient) for _ in range(3))
    _gate_backward(*_arrays(gradient, gated, raised, inner, of_gated, of_raised))
    return inner, of_gated, of_raised


@_over_rows
def _gate_backward(gradient: Any, gated: Any, raised: Any, inner: Any, of_gated: Any, of_raised: Any) -> None:
    rows, width = gradient.shape
    for i in prange(rows):
        for j in range(width):
            share = _sigmoid(gated[i, j])
            silu = gated[i, j] * share
            inner[i, j] = silu * raised[i, j]
            of_raised[i, j] = silu * gradient[i, j]
            of_gated[i, j] = gradient[i, j] * raised[i, j] * (share + silu * (np.float32(1) - share))


def sum_rows(x: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Sums [N, ...] of rows of x [S, ...]: the first of those that `order` names up to ends[0], and so on."""
    total = x.new_empty(len(ends), *x.shape[1:])
    _sum_rows(*_arrays(x.flatten(1).contiguous(), order, ends, total.flatten(1)))
    return total


@_over_rows
def _sum_rows(x: Any, order: Any, ends: Any, total: Any) -> None:
    rows, width = total.shape
    for i in prange(rows):
        sums = total[i]
        sums[:] = np.float32(0)
        for slot in order[(ends[i - 1] if i else 0) : ends[i]]:
            for j in range(width):
                sums[j] += x[slot, j]


def look(
    new: tuple[Tensor, Tensor, Tensor], cache: Sequence[Tensor], said: Tensor, elsewhere: Sequence[Tensor], scale: float
) -> Tensor:
    """One token more for each of n rows. Returns its outputs, [n, H, D].

    `new`: its queries [n, H, D], and its keys and values [n, Hkv, D], which go to place `said` [n] of the `cache`,
    keys and values [N, Hkv, T, D]. The queries look at all up to it. What they found `elsewhere` is put together with
    that: outputs [s, r, Hkv, D], logs of the softmax's masses [s, r, Hkv], and where among the s each row is, [n].
    """
    seen = new[0].new_empty(new[0].shape)
    _look(*_arrays(*new, *cache, said, *elsewhere), np.float32(scale), *_arrays(seen))
    return seen


@_over_rows
def _look(
    q: Any, k: Any, v: Any, keys: Any, values: Any, said: Any, found: Any, mass: Any, place: Any, scale: Any, seen: Any
) -> None:
    rows, heads, width = q.shape
    groups = k.shape[1]
    for i in prange(rows):
        count = said[i] + 1
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
                top = max(_largest(scores), mass[place[i], r, g])
                total = share = _exp(mass[place[i], r, g] - top)
                for t in range(count):
                    scores[t] = _exp(scores[t] - top)
                # Not in the loop above, whose sum adds up in another order once it is loaded from disk.
                for t in range(count):
                    total += scores[t]
                for j in range(width):
                    output[j] = share * found[place[i], r, g, j]
                _add_rows(output, scores, own_values)
                for j in range(width):
                    seen[i, head, j] = output[j] / total


def draw(logits: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of logits [B, V], the first token up to which there is more than the share `chances` [B] (float64) of
    its mass, [B]; and the token's log-probability, [B]."""
    tokens, logprobs = torch.empty_like(chances, dtype=torch.long), torch.empty_like(chances, dtype=torch.float32)
    _draw(*_arrays(logits.contiguous(), logits.amax(1), chances, tokens, logprobs))
    return tokens, logprobs


_ENTRIES = 64
"""Of a row, whose mass is summed up before it is known where the chance falls."""


@_over_rows
def _draw(logits: Any, tops: Any, chances: Any, tokens: Any, logprobs: Any) -> None:
    rows, count = logits.shape
    blocks = -(-count // _ENTRIES)
    for i in prange(rows):
        row, top = logits[i], tops[i]
        of_block = np.empty(blocks, np.float64)
        total, last = 0.0, 0
        for b in range(blocks):
            block = row[b * _ENTRIES : (b + 1) * _ENTRIES]
            mass = np.float32(0)
            for j in range(len(block)):
                mass += _mass(block[j] - top)
            of_block[b] = mass
            total += of_block[b]
            if mass > 0:
                last = b
        sought, before, b = chances[i] * total, 0.0, 0
        while b < last and before + of_block[b] <= sought:
            before += of_block[b]
            b += 1
        # Rounding never leads past the last entry that has any mass.
        token = b * _ENTRIES
        for j in range(b * _ENTRIES, min(count, (b + 1) * _ENTRIES)):
            mass = _mass(row[j] - top)
            if mass > 0:
                token = j
                before += mass
                if before > sought:
                    break
        tokens[i] = token
        logprobs[i] = row[token] - top - np.float32(np.log(total))


@_inner
def _add_rows(total: Any, weights: Any, rows: Any) -> None:
    """total [D] += weights [T] x rows [T or more, D], four at a time: the total is read and written less often."""
    count, fours = len(weights), len(weights) // 4 * 4
    for t in range(0, fours, 4):
        a, b, c, d = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        for j in range(len(total)):
            total[j] += (a * rows[t, j] + b * rows[t + 1, j]) + (c * rows[t + 2, j] + d * rows[t + 3, j])
    for t in range(fours, count):
        for j in range(len(total)):
            total[j] += weights[t] * rows[t, j]


@partial(_compiled, fastmath=True)
def _largest(x: Any) -> Any:
    largest = x[0]
    for i in range(len(x)):
        largest = max(largest, x[i])
    return largest


@_exactly
def _mass(x: Any) -> Any:
    return _exp(x) if x > np.float32(-87) else np.float32(0)


@_exactly
def _sigmoid(x: Any) -> Any:
    return np.float32(1) / (np.float32(1) + _exp(-x))


@_exactly
def _exp(x: Any) -> Any:
    """e^x to two units in the last place: 2^n e^r with |r| up to ln 2 / 2, whose series ends after r^7 / 7!.

    The compiler calls a library for each number of `np.exp`; this it does for several at a time."""
    if x < np.float32(-87):
        x = np.float32(-87)
    if x > np.float32(88):
        x = np.float32(88)
    n = np.floor(x * np.float32(1.442695041) + np.float32(0.5))
    # ln 2 in two parts, the first so short that its product with n is exact
    r = (x - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
    series = np.float32(1 / 720) + r * np.float32(1 / 5040)
    series = np.float32(1 / 24) + r * (np.float32(1 / 120) + r * series)
    series = np.float32(1 / 2) + r * (np.float32(1 / 6) + r * series)
    series = np.float32(1) + r * (np.float32(1) + r * series)
    return series * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


def _arrays(*tensors: Tensor) -> list[Any]:
    return [tensor.detach().numpy() for tensor in tensors]
