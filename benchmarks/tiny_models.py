"""A tiny model of any causal type of the installed transformers, with the kinds of settings of a real checkpoint."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.tiny_settings import FILLED, OF_TYPE, SIZES, VOCABULARY
from grpo.model.rope import reset_rope

PROMPTS = [[5, 9, 7, 6, 11, 23, 31, 8, 44, 17], [12, 60, 33]]
LENGTHS = [[19, 12, 25], [16, 21, 5]]
WRONG = 1e-3
"""Largest difference of a log-probability in nats, and of a gradient relative to the largest of its parameter."""
SMALLEST = 1e-3
"""Share of the largest gradient of all below which a parameter's gradients are not told from rounding."""

LEFT_OUT = (
    "transformers_version",
    "model_type",
    "architectures",
    "dtype",
    "per_layer_config",
    "qk_layernorm_config",
    "number_of_conv_states",
    "_name_or_path",
    "output_attentions",
)
"""Fields that a configuration derives from others."""

Gradients = dict[str, Tensor]
"""By the name of their parameter."""

PROMPT_ROWS = [prompt for prompt, lengths in zip(PROMPTS, LENGTHS, strict=True) for _ in lengths]
_RANDOM = torch.Generator().manual_seed(1)
COMPLETIONS = [
    torch.randint(3, VOCABULARY, (length,), generator=_RANDOM).tolist() for lengths in LENGTHS for length in lengths
]
"""Of each prompt row, tokens."""


def tiny_config(kind: str, **changes: Any) -> Any:
    """A configuration of a few thousand weights with the form of a real one."""
    config = CONFIG_MAPPING[kind.partition(":")[0]]()
    return type(config)(**_shrunk(config, {**OF_TYPE.get(kind, {}), **changes}))


def _shrunk(config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    fields = {name: _value(config, name, value) for name, value in config.to_dict().items()}
    sub_configs = {name for name in getattr(config, "sub_configs", {}) if fields.get(name) is not None}
    smaller = {}
    old_layers = fields.get("num_hidden_layers")
    layers = next((SIZES[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in fields), 4)
    for name, value in fields.items():
        if name in sub_configs:
            part = getattr(config, name)
            own = changes.get(name, {})  # also fields that have no default
            smaller[name] = {**_shrunk(part, {**changes, **own}), **own, "model_type": part.model_type}
        elif name in SIZES and value is not None:
            smaller[name] = SIZES[name]
        elif (isinstance(value, list) and name != "layer_types" and len(value) == old_layers) or (
            name == "layer_types" and value
        ):
            smaller[name] = _some_of_each(value, layers)
        elif value is None and name in FILLED:
            smaller[name] = SIZES[name]
        elif name not in LEFT_OUT:
            smaller[name] = value
    if "kv_lora_rank" in fields:
        smaller |= {"num_key_value_heads": 4, "qk_head_dim": 16, "head_dim": 8}
    smaller.update({name: value for name, value in changes.items() if name in fields.keys() - sub_configs})
    smaller["dtype"] = "float32"
    return smaller


def _value(config: Any, name: str, written: Any) -> Any:
    try:
        return getattr(config, name, written)
    except Exception:  # a field that only layers have
        return written


def _some_of_each(kinds: list[str], count: int) -> list[str]:
    """`count` layers with each kind at least once, in the order of their first appearance."""
    first = list(dict.fromkeys(kinds))
    return [first[i * len(first) // count] if len(first) < count else first[i] for i in range(count)]


def build(kind: str, folder: Path, **changes: Any) -> None:
    """Writes a model with random weights, large enough that attention is far from uniform. `changes`: of its
    configuration."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)


def alone(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """Log-probabilities of a completion by transformers' forward pass over this sequence only."""
    reset_rope(model)
    ids = torch.tensor([[*prompt, *completion]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(1).gather(1, torch.tensor(completion, device=model.device)[:, None]).squeeze(1)


def expected_of(own: Any) -> tuple[list[Tensor], Gradients]:
    """Log-probabilities of COMPLETIONS by transformers alone, and the gradients of their sum."""
    expected = [alone(own, prompt, completion) for prompt, completion in zip(PROMPT_ROWS, COMPLETIONS, strict=True)]
    torch.cat(expected).sum().backward()
    return [row.detach() for row in expected], gradients_of(own)


def exact_gradients(own: Any) -> Gradients | None:
    """Those of `expected_of` in float64. None for a model that transformers does not compute in float64."""
    exact = deepcopy(own).double()
    try:
        exact.set_experts_implementation("eager")  # grouped products have no float64
        return expected_of(exact)[1]
    except RuntimeError:
        return None


def gradients_of(model: Any) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradient_error(own: Gradients, found: Gradients) -> float:
    """Largest |g - g'| of a parameter relative to its largest |g|, over all parameters; so a wrong gradient of a few
    numbers, such as a norm's, counts as much as a matrix's. Gradients that are 0 but for rounding do not count: what is
    below SMALLEST of the largest gradient of all is held against that."""
    largest = max(gradient.abs().max().item() for gradient in own.values())
    errors = []
    for name in own.keys() | found:
        expected = own.get(name, torch.zeros(())).double()
        difference = (expected - found.get(name, torch.zeros(())).double()).abs().max().item()
        errors.append(difference / max(expected.abs().max().item(), SMALLEST * largest))
    return torch.tensor(errors).max().item()  # Python's max may leave out a NaN
