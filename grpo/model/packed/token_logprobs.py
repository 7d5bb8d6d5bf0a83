"""Log-probabilities of tokens from hidden states, without holding the logits of a whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo.model.cpu.limits import CACHED_BYTES, KEPT_BYTES, chunk_bytes
from grpo.model.packed import elementwise
from grpo.model.packed.autograd import add_product
from grpo.model.packed.products import float32_linear, kept_in_float32


def token_logprobs(states: Tensor, head: torch.nn.Linear, targets: Tensor, temperature: float) -> Tensor:
    """log softmax(head(states) / temperature) at `targets` [N], for states [N, H]; float32."""
    logprobs: Tensor = _TokenLogprobs.apply(states, head.weight, head.bias, targets, temperature)
    return logprobs


def unfused_token_logprobs(
    states: Tensor, head: Callable[[Tensor], Tensor], vocabulary: int, targets: Tensor, temperature: float
) -> Tensor:
    """`token_logprobs` for any function from states [N, H] to logits [N, V], with autograd's own backward pass, which
    recomputes chunks."""

    def logprobs(states: Tensor, targets: Tensor) -> Tensor:
        return torch.log_softmax(head(states).float() / temperature, 1).gather(1, targets[:, None]).squeeze(1)

    chunks = [(states[c], targets[c]) for c in _chunks(states, vocabulary, keeps=0)]
    return torch.cat([checkpoint(logprobs, *chunk, use_reentrant=False) for chunk in chunks])


class _TokenLogprobs(torch.autograd.Function):
    """Holds logits and their gradients for one chunk of tokens at a time."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, t: float) -> Tensor:
        ctx.save_for_backward(states, weight, bias, targets)
        keeps = KEPT_BYTES[_kind(states.device)] // (4 * len(weight)) if any(ctx.needs_input_grad) else 0
        ctx.softmax = (_OnCPU if states.device.type == "cpu" else _OnGPU)(t, weight.dtype)
        ctx.kept, ctx.chunks = None, _chunks(states, len(weight), keeps)
        logprobs, wide_weight = [], kept_in_float32(weight)
        for c in ctx.chunks:
            logits = float32_linear(states[c], wide_weight, bias).float()
            chunk_logprobs, kept = ctx.softmax.logprobs(logits, targets[c])
            logprobs.append(chunk_logprobs)
            if c.stop <= keeps:
                ctx.kept = kept
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets = ctx.saved_tensors
        grad_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        grad_weight = None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        wide_weight = None
        for c in ctx.chunks:
            kept, ctx.kept = ctx.kept, None
            if kept is None:
                wide_weight = kept_in_float32(weight) if wide_weight is None else wide_weight
                _, kept = ctx.softmax.logprobs(float32_linear(states[c], wide_weight, bias).float(), targets[c])
            grad_logits = ctx.softmax.grad_logits(kept, targets[c], gradient[c])
            del kept
            if grad_states is not None:
                torch.mm(grad_logits, weight, out=grad_states[c])
            if ctx.needs_input_grad[1]:
                if grad_weight is None:
                    grad_weight = add_product(weight, grad_logits, states[c])
                else:
                    grad_weight.addmm_(grad_logits.t(), states[c])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return grad_states, grad_weight, grad_bias, None, None


def _chunks(states: Tensor, vocabulary: int, keeps: int) -> list[slice]:
    """Slices of tokens: first one chunk of the `keeps` tokens whose softmax is kept (one, because each chunk writes the
    gradient of the weights once), then chunks of the others. Without tokens there is one empty chunk, so that the
    weights get a gradient in every process."""
    size = max(1, chunk_bytes(_kind(states.device), _memory(states.device)) // (4 * vocabulary))
    keeps = min(keeps, len(states))
    kept = [slice(0, keeps)] if keeps else []
    others = [slice(start, min(start + size, len(states))) for start in range(keeps, len(states), size)]
    return kept + others or [slice(0, 0)]


Kept = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _OnCPU:
    """Softmax of a chunk in parts that fit into a CPU's caches, each overwritten in place."""

    temperature: float
    dtype: torch.dtype  # of the weights

    def logprobs(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Kept]:
        """Log-probabilities of the targets [N]; the softmax's numerators [N, V] and denominators [N]."""
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        logprobs, totals = _softmax_parts(logits, targets)
        return logprobs, (logits, totals)

    def grad_logits(self, kept: Kept, targets: Tensor, gradient: Tensor) -> Tensor:
        numerators, totals = kept
        # d logp_y / d logits = onehot(y) - softmax
        grad_logits = numerators.mul_((-gradient / (self.temperature * totals))[:, None])
        rows = torch.arange(len(grad_logits), device=gradient.device)
        grad_logits[rows, targets] += gradient / self.temperature
        return grad_logits.to(self.dtype)


@dataclass(frozen=True)
class _OnGPU:
    """Softmax of a chunk in kernels that read the logits once or twice."""

    temperature: float
    dtype: torch.dtype  # of the weights

    def logprobs(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Kept]:
        """Log-probabilities of the targets [N]; the logits [N, V] and the softmax's logsumexp [N]."""
        logprobs, logsumexp = elementwise.softmax_logprobs(logits, targets, self.temperature)
        return logprobs, (logits, logsumexp)

    def grad_logits(self, kept: Kept, targets: Tensor, gradient: Tensor) -> Tensor:
        logits, logsumexp = kept
        return elementwise.logits_gradient(logits, targets, logsumexp, gradient, self.temperature, self.dtype)


def _softmax_parts(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets [N], and the softmax's denominators [N]. Overwrites `logits` [N, V] with the
    softmax's numerators, exp(logit - row maximum)."""
    rows = max(1, CACHED_BYTES // (4 * logits.shape[1]))
    logprobs, totals = [], []
    for part, part_targets in zip(logits.split(rows), targets.split(rows), strict=True):
        target_logits, maxima = part.gather(1, part_targets[:, None]), part.amax(1, keepdim=True)
        total = part.sub_(maxima).exp_().sum(1, keepdim=True)
        logprobs.append((target_logits - maxima - total.log()).squeeze(1))
        totals.append(total.squeeze(1))
    return torch.cat(logprobs), torch.cat(totals)


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "cuda"  # "meta" stands for a GPU in tests


@cache
def _memory(device: torch.device) -> int:
    """Bytes of a GPU's memory; 0 of another device."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return int(torch.cuda.get_device_properties(device).total_memory) if on_gpu else 0
