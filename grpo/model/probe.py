"""Checks at loading whether a model computes the same packed as unpacked, on a few short sequences.

There is no list of architectures that may be packed. The reference is log-probabilities from transformers' own forward
pass, one sequence at a time. Those of packed sequences with shared prompts, and of step-by-step decoding, are compared
with them. Arithmetic is float32 for any dtype of the weights, so that rounding hides no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo.model.decoder import Decoder
from grpo.model.float32 import Float32
from grpo.model.lm_head import backbone_of, base_of
from grpo.model.logprobs import completion_logprobs, token_states
from grpo.model.plain import generate, generates_alone

PROMPTS = ([5, 9, 7, 6, 11], [5, 9, 7, 6, 11], [8, 3, 12])
COMPLETIONS = ([10, 4, 13, 7], [6, 12, 9, 3], [4, 5, 11, 10])
TOLERANCE = 1e-2
"""Largest allowed difference of a log-probability, nats in float32 arithmetic. Small random models differ by at most
1e-5 and SmolLM2-135M by 3e-3, because its largest activations magnify rounding; a wrong scale or cap gives 0.04 or
more."""
SAMPLED = 64
"""Numbers of each weight that are compared before and after a forward pass."""


class Weights:
    """A model's weights, to find those that a forward pass changes in place: such a model would be saved with other
    weights than it was given."""

    def __init__(self, model: Any):
        self.weights = dict(model.named_parameters())
        self.before = {name: (weight._version, _some(weight)) for name, weight in self.weights.items()}

    @property
    def written(self) -> list[str]:
        """Names of the weights that were written to, perhaps without a change."""
        return [name for name, weight in self.weights.items() if weight._version != self.before[name][0]]

    @property
    def changed(self) -> str | None:
        """Name of a weight that was changed."""
        found = (name for name in self.written if not torch.equal(_some(self.weights[name]), self.before[name][1]))
        return next(found, None)


def _some(weight: Tensor) -> Tensor:
    """A copy of a few numbers of a weight: all would take a second of a large model."""
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLED)].clone()


@torch.no_grad()
def own_logprobs(model: Any) -> list[Tensor]:
    """Log-probabilities of the probe's completions by transformers' own forward pass, one sequence at a time."""
    logprobs = []
    for prompt, completion in probe_sequences(model):
        ids = torch.tensor([[*prompt, *completion]], device=model.device)
        with Float32():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            targets = torch.tensor(completion, device=model.device)[:, None]
            logprobs.append(logits.float().log_softmax(1).gather(1, targets).squeeze(1))
    return logprobs


@torch.no_grad()
def own_scores(model: Any) -> list[Tensor]:
    """A reward model's scores of the probe's sequences, by transformers' own forward pass."""
    scores = []
    for prompt, completion in probe_sequences(model):
        ids = torch.tensor([[*prompt, *completion]], device=model.device)
        with Float32():
            states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            scores.append(model.score(states[0, -1]).float())
    return scores


def check_gradients(model: Any) -> None:
    """Runs transformers' own forward and backward passes on a training sequence, and raises what they raise: some
    models refuse, as Reformer's classes do outside training mode. No weight gets a gradient."""
    prompt, completion = probe_sequences(model)[0]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hook = model.get_input_embeddings().register_forward_hook(lambda _, __, out: out.detach().requires_grad_() * 1)
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        ids = torch.tensor([[*prompt, *completion]], device=model.device)
        states = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
        if states.requires_grad:  # false if another module embeds tokens
            states.sum().backward()
    finally:
        hook.remove()
        for parameter in trained:
            parameter.requires_grad_(True)


@torch.no_grad()
def logprob_difference(model: Any, expected: list[Tensor]) -> str | None:
    """What differs from `own_logprobs` in the way that the model is set to run, in a few words; None: nothing
    significant."""
    prompts, completions = zip(*probe_sequences(model), strict=True)
    with Float32():
        logprobs = completion_logprobs(model, prompts, completions, 1.0)
    if (error := _largest(logprobs, expected)) > TOLERANCE:
        return f"log-probabilities differ by {error:.2g} nats"
    return None


@torch.no_grad()
def decoded_difference(model: Any, expected: list[Tensor]) -> str | None:
    """`logprob_difference` for packed decoding, token by token."""
    prompts, completions = zip(*probe_sequences(model), strict=True)
    with Float32():
        decoded = _decoded_logprobs(model, prompts, completions)
    if (error := _largest(decoded, expected)) > TOLERANCE:
        return f"decoding token by token differs by {error:.2g} nats"
    return None


@torch.no_grad()
def score_difference(model: Any, expected: list[Tensor]) -> str | None:
    """`logprob_difference` for a reward model, relative to `own_scores`."""
    prompts, completions = zip(*probe_sequences(model), strict=True)
    rows, last = torch.arange(len(prompts)), torch.tensor([len(p) + len(c) - 1 for p, c in probe_sequences(model)])
    with Float32():
        scores = model.score(token_states(model.base_model, prompts, completions, rows, last)).float()
    error, largest = _largest(scores, expected), torch.cat(expected).abs().max().item()
    return f"scores differ by {error:.2g}" if error > TOLERANCE * max(1.0, largest) else None


@torch.no_grad()
def packed_states(model: Any) -> Tensor:
    """Last hidden states [K, H] of the tokens before the probe's completions and in them, in the way that the model is
    set to run."""
    prompts, completions = zip(*probe_sequences(model), strict=True)
    rests = [completion[:-1] for completion in completions]  # as for log-probabilities
    places = [
        (row, at) for row, (p, r) in enumerate(zip(prompts, rests, strict=True)) for at in range(len(p) - 1, len(p + r))
    ]
    rows, columns = torch.tensor(places).unbind(1)
    with Float32():
        return token_states(backbone_of(model), prompts, rests, rows, columns)


@torch.no_grad()
def generated_difference(model: Any, expected: list[Tensor]) -> str | None:
    """`logprob_difference` for transformers' own `generate`, which plain sampling uses: with the first two sequences,
    which are a group, side by side, unless the model `generates_alone`."""
    prompts, completions = zip(*probe_sequences(model), strict=True)
    targets = torch.tensor(completions, device=model.device)
    for rows in [slice(0, 1), slice(1, 2), slice(2, 3)] if generates_alone(model) else [slice(0, 2), slice(2, 3)]:
        waiting, generated = [*targets[rows].unbind(1)], list[Tensor]()

        def draw(logits: Tensor, waiting: list[Tensor] = waiting, generated: list[Tensor] = generated) -> Tensor:
            tokens = waiting.pop(0)
            generated.append(logits.log_softmax(1).gather(1, tokens[:, None]))
            return tokens

        with Float32():
            generate(base_of(model), torch.tensor(prompts[rows], device=model.device), len(waiting), None, draw)
        if (error := _largest(torch.cat(generated, 1), expected[rows])) > TOLERANCE:
            return f"its generate differs from its forward pass by {error:.2g} nats"
    return None


def probe_sequences(model: Any) -> list[tuple[list[int], list[int]]]:
    """The probe's prompts and completions, made of tokens that every vocabulary has."""
    size = model.get_input_embeddings().weight.shape[0]
    return [([t % size for t in p], [t % size for t in c]) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]


def _largest(actual: Iterable[Tensor], expected: Sequence[Tensor]) -> float:
    differences = [(one - other).abs().max() for one, other in zip(actual, expected, strict=True)]
    largest = torch.stack(differences).max().item()
    return largest if largest == largest else float("inf")


def _decoded_logprobs(model: Any, prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> Tensor:
    """Log-probabilities [B, C] by decoding; the first two rows are one group, the third is another."""
    decoder, targets = Decoder(model), torch.tensor(completions, device=model.device)
    first = decoder.add_groups([prompts[0]], 2)
    logits = torch.cat([first.expand(2, -1), decoder.add_groups([prompts[2]], 1)])
    logprobs = []
    for column in targets.unbind(1):
        logprobs.append(logits.float().log_softmax(1).gather(1, column[:, None]))
        logits = decoder.step(column)
    return torch.cat(logprobs, 1)


@contextmanager
def attention_as(model: Any, implementation: str) -> Iterator[None]:
    """Context in which the model uses another implementation of attention."""
    before = backbone_of(model).config._attn_implementation
    set_attention(model, implementation)
    try:
        yield
    finally:
        set_attention(model, before)


def set_attention(model: Any, implementation: str) -> None:
    """Sets the attention implementation of a model and of all its parts."""
    for module in base_of(model).modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = implementation
