"""Computes logits from last hidden states as each model does: some models scale the logits, some cap them.

No configuration field that all models share says so. Therefore the model's own forward pass is called with a backbone
that returns given states.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import GenerationMixin, PreTrainedModel

from grpo.model.float32 import Float32
from grpo.model.packed.attention import is_packed, is_unfused
from grpo.model.packed.products import Widened, float32_linear, kept_in_float32
from grpo.model.packed.token_logprobs import token_logprobs, unfused_token_logprobs

PROBE_ROWS, PROBE_LOGIT = 4, 1000.0
"""Number of states in the probe, and its largest logit: far above any cap, so that a cap has an effect."""
TOLERANCE = 1e-4
"""Relative tolerance, in float32 arithmetic."""


def base_of(model: Any) -> Any:
    """A language model without its adapter wrapper; the adapters stay active."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def is_policy(model: Any) -> bool:
    """Whether a model generates text; otherwise it is a reward model."""
    return isinstance(model, GenerationMixin)


def backbone_of(model: Any) -> Any:
    """The transformer under a language model's head, with its adapters active."""
    base: Any = base_of(model)
    decoder = base.get_decoder() if is_policy(base) else base.base_model
    if not isinstance(decoder, PreTrainedModel):  # another attribute of that name
        decoder = base.base_model
    if decoder is base:  # its class names no base model
        decoder = next((part for part in base.children() if isinstance(part, PreTrainedModel)), base)
    return decoder


class Head:
    """The head of a language model, with everything that the model does to its logits."""

    def __init__(self, model: Any):
        self.model, self.backbone, self.linear = base_of(model), backbone_of(model), model.get_output_embeddings()
        if not hasattr(self.model, "r1flow_logit_scale"):
            self.model.r1flow_logit_scale = _scale_of(self)
        self.scale: float | None = self.model.r1flow_logit_scale
        self._kept: Tensor | Widened | None = None

    def for_decoding(self) -> Head:
        """Prepares for a call per token while the weights stay as they are. Returns itself."""
        if self.scale is not None:
            self._kept = kept_in_float32(self.linear.weight)
        return self

    def __call__(self, states: Tensor) -> Tensor:
        """Logits [N, V] of states [N, H], in float32 or wider if the head is a linear layer."""
        if self.scale is None:
            return self.own(states)
        weight = self.linear.weight if self._kept is None else self._kept
        logits = float32_linear(states, weight, self.linear.bias)
        return logits if self.scale == 1 else logits * self.scale

    def own(self, states: Tensor) -> Tensor:
        """Logits [N, V] by the model's own code, which caps or scales its linear layer's output, in float32."""
        ids = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        with _returning(self.backbone, states[None]) as calls, _in_float32(self.linear):
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        if not calls:
            raise RuntimeError("its head cannot be called apart from its transformer")
        return logits[0]

    def logprobs(self, states: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """log softmax(logits / temperature) at `targets` [N], for states [N, H]; float32. A model that runs plain uses
        its own code for the logits, and torch's softmax."""
        packed = is_packed(self.backbone)
        if self.scale is not None and packed and not is_unfused(self.backbone):
            return token_logprobs(states, self.linear, targets, temperature / self.scale)
        logits_of = self if packed or self.backbone is self.model else self.own
        return unfused_token_logprobs(states, logits_of, self.linear.weight.shape[0], targets, temperature)


def _scale_of(head: Head) -> float | None:
    """s if the logits are s (W x + b) for states x; None if they are anything else, such as capped."""
    if type(head.linear) is not nn.Linear:
        return None
    weight = head.linear.weight
    if weight.is_meta or head.backbone is head.model:
        return 1.0
    with torch.no_grad(), Float32():
        count = PROBE_ROWS * weight.shape[1]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        states = torch.arange(count, dtype=dtype, device=weight.device).sin().view(PROBE_ROWS, -1)
        states = states * (PROBE_LOGIT / linear(states, weight).abs().max().clamp_min(1e-30))
        plain = linear(states, weight, head.linear.bias).double()
        own = head.own(states).double()
        scale = ((own * plain).sum() / plain.square().sum()).item()
        if not torch.allclose(own, scale * plain, rtol=TOLERANCE, atol=TOLERANCE * own.abs().max().item()):
            return None
    return 1.0 if abs(scale - 1) < TOLERANCE / 10 else scale


class _Output:
    """Output of a backbone that contains only the last hidden states."""

    def __init__(self, states: Tensor):
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, _: str) -> None:
        return None


@contextmanager
def _returning(backbone: Any, states: Tensor) -> Iterator[list[bool]]:
    """Context in which the backbone returns `states` [1, N, H] for any arguments. Yields a list that gets one element
    per call."""
    calls: list[bool] = []

    def forward(*_: Any, **__: Any) -> _Output:
        calls.append(True)
        return _Output(states)

    before = backbone.__dict__.get("forward")
    backbone.forward = forward
    try:
        yield calls
    finally:
        if before is None:
            del backbone.forward
        else:
            backbone.forward = before


@contextmanager
def _in_float32(head: Any) -> Iterator[None]:
    """Context in which a linear layer returns float32 or wider, so that later operations on its result are not
    rounded."""
    if type(head) is not nn.Linear:
        yield
        return

    def forward(states: Tensor) -> Tensor:  # [1, N, H]
        return float32_linear(states.flatten(0, -2), head.weight, head.bias).unflatten(0, states.shape[:-1])

    vars(head)["forward"] = forward
    try:
        yield
    finally:
        del vars(head)["forward"]
