"""Log-probabilities of completions under a model, without ever holding the logits of a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo.model.cpu.limits import CACHED_BYTES, CHUNK_BYTES, KEPT_BYTES
from grpo.model.packed.attention import hidden_states
from grpo.model.packed.autograd import add_product
from grpo.model.packed.packing import integers, pack, ranges


def stack(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """[B, T] from B vectors of different lengths; what is past a row's end holds 0."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device)


def trunk_of(model: Any) -> Any:
    """The transformer under a language model's head; adapters are inside it and stay in force."""
    return (model.get_base_model() if hasattr(model, "peft_config") else model).base_model


def completion_states(
    trunk: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last hidden state before each completion token.

    `trunk` is a transformer without its head. Returns states [N, H] for the N completion tokens of the batch, row after
    row, the tokens themselves [N], and the row [N] and column [N] of each in a [B, C] table of completions.
    """
    device = next(trunk.parameters()).device
    # Nothing is predicted by a completion's last token, so it is not computed.
    packed = pack(prompts, [completion[:-1] for completion in completions], device)
    hidden = hidden_states(trunk, packed.ids, packed.positions, packed.attention)
    lengths = integers([len(completion) for completion in completions])
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    columns = ranges(torch.zeros_like(lengths), lengths)
    first, starts = integers(packed.first)[rows], integers(packed.starts)[rows]
    places = torch.where(columns == 0, first, starts + columns - 1)
    targets = integers([token for completion in completions for token in completion])
    index = torch.stack([places, targets, rows, columns]).to(device)
    return hidden.index_select(0, index[0]), index[1], index[2], index[3]


def completion_logprobs(
    model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float
) -> Tensor:
    """Log-probability of every completion token given what precedes it, at a softmax temperature.

    Returns [B, C] with C the longest completion; positions past a completion's end hold 0.
    """
    states, targets, rows, columns = completion_states(trunk_of(model), prompts, completions)
    chosen = token_logprobs(states, model.get_output_embeddings(), targets, temperature)
    return chosen.new_zeros(len(prompts), max(map(len, completions))).index_put((rows, columns), chosen)


def token_logprobs(states: Tensor, head: torch.nn.Linear, targets: Tensor, temperature: float) -> Tensor:
    """log softmax(head(states) / temperature) at `targets`, [N], for states [N, H]; float32."""
    return _TokenLogprobs.apply(states, head.weight, head.bias, targets, temperature)


class _TokenLogprobs(torch.autograd.Function):
    """Logits and their gradients exist for a chunk of tokens at a time."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, t: float) -> Tensor:
        ctx.save_for_backward(states, weight, bias, targets)
        keeps = _limit(KEPT_BYTES, states) // (4 * len(weight)) if any(ctx.needs_input_grad) else 0
        ctx.temperature, ctx.kept, ctx.chunks = t, None, _chunks(states, weight, keeps)
        chosen = []
        for c in ctx.chunks:
            logits = _logits(states[c], weight, bias, t)
            logprobs, totals = _masses(logits, targets[c])
            chosen.append(logprobs)
            if c.stop <= keeps:
                ctx.kept = logits, totals
        return torch.cat(chosen)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets = ctx.saved_tensors
        of_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        of_weight = None
        of_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for c in ctx.chunks:
            kept, ctx.kept = ctx.kept, None
            if kept is None:
                masses = _logits(states[c], weight, bias, ctx.temperature)
                _, totals = _masses(masses, targets[c])
            else:
                masses, totals = kept
            # d logp_y / d logits = onehot(y) - softmax
            of_logits = masses.mul_((-gradient[c] / (ctx.temperature * totals))[:, None])
            del masses, kept
            of_logits[torch.arange(len(of_logits), device=gradient.device), targets[c]] += gradient[c] / ctx.temperature
            of_logits = of_logits.to(weight.dtype)
            if of_states is not None:
                torch.mm(of_logits, weight, out=of_states[c])
            if ctx.needs_input_grad[1]:
                if of_weight is None:
                    of_weight = add_product(weight, of_logits, states[c])
                else:
                    of_weight.addmm_(of_logits.t(), states[c])
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        return of_states, of_weight, of_bias, None, None


def _chunks(states: Tensor, weight: Tensor, keeps: int) -> list[slice]:
    """The tokens whose probabilities are kept in one, for the gradient of the weights is written once a chunk; then
    chunks of the others."""
    size = max(1, _limit(CHUNK_BYTES, states) // (4 * len(weight)))
    keeps = min(keeps, len(states))
    kept = [slice(0, keeps)] if keeps else []
    return kept + [slice(start, min(start + size, len(states))) for start in range(keeps, len(states), size)]


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(states, weight, bias).float()
    return logits.div_(temperature) if temperature != 1.0 else logits


def _masses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets [N] and the sums [N] of the masses that the logits [N, V] become, e^(logit -
    the largest)."""
    rows = max(1, _limit(CACHED_BYTES, logits) // (4 * logits.shape[1]))
    chosen, totals = [], []
    for part, of_part in zip(logits.split(rows), targets.split(rows), strict=True):
        picked, largest = part.gather(1, of_part[:, None]), part.amax(1, keepdim=True)
        total = part.sub_(largest).exp_().sum(1, keepdim=True)
        chosen.append((picked - largest - total.log()).squeeze(1))
        totals.append(total.squeeze(1))
    return torch.cat(chosen), torch.cat(totals)


def _limit(limits: dict[str, int], states: Tensor) -> int:
    return limits.get(states.device.type, limits["cuda"])
