"""Finds the innermost module that computes different outputs from the same inputs when sequences are packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo.model.float32 import Float32
from grpo.model.lm_head import backbone_of
from grpo.model.packed.attention import Packed, is_unfused, packed_inputs
from grpo.model.packed.by_rows import LEFT_OUT, MASK
from grpo.model.packed.current import running
from grpo.model.packed.packing import pack
from grpo.model.probe import probe_sequences

Arguments = dict[int | str, Any]
"""The arguments of a call, by position or name."""


@dataclass(frozen=True)
class Difference:
    """A module that computes something different when packed, or fails."""

    name: str
    attends: bool  # it calls our attention, which did not fail: running it by rows would hide the fault
    given: dict[int | str, str]  # arguments that differ without packing: MASK or LEFT_OUT


@dataclass
class _Trace:
    """The first call of each module in a forward pass, inner modules first, and those that failed."""

    inputs: dict[str, Arguments] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)  # innermost first
    attended: set[str] = field(default_factory=set)  # modules that attended through the layout


@torch.no_grad()
def first_difference(model: Any, own_attention: Callable[[], AbstractContextManager[None]]) -> Difference | None:
    """The innermost module that fails, or whose output differs, when two sequences are packed, although its inputs
    equal those without packing. None: there is no such module. `own_attention`: context in which the model uses
    transformers' attention.
    """
    backbone, rows = backbone_of(model), [p + c for p, c in probe_sequences(model)[1:]]
    with own_attention():
        alone = [_traced(backbone, input_ids=torch.tensor([row], device=model.device)) for row in rows]
    packed = pack([[], []], rows, model.device, unfused=is_unfused(backbone))
    with running(packed.attention, packed.positions[0]):
        together = _traced(backbone, **packed_inputs(packed.ids, packed.positions, packed.attention))
    for name in (*together.outputs, *together.failed):
        if not all(name in trace.outputs for trace in alone):
            continue
        inputs = [trace.inputs[name] for trace in alone]
        if _agree(together.inputs[name], inputs, (1,)) is not True:
            continue
        outputs = [trace.outputs[name] for trace in alone]
        if name in together.failed or _agree(together.outputs[name], outputs) is False:
            changed = _changed(together.inputs[name], inputs[0], len(rows[0]))
            return Difference(name, name in together.attended - {*together.failed}, changed)
    return None


def _changed(together: Arguments, alone: Arguments, length: int) -> dict[int | str, str]:
    """The arguments that must take a different form for a single sequence of `length` tokens than for a pack."""
    changed = {}
    for place, value in together.items():
        own = alone.get(place)
        if isinstance(own, Tensor) and own.dim() == 4 and own.shape[-2:] == (length, length):
            changed[place] = MASK
        elif own is None and isinstance(value, Tensor):
            changed[place] = LEFT_OUT
    return changed


def _traced(backbone: Any, **inputs: Any) -> _Trace:
    trace, running_now = _Trace(), list[str]()
    layout: Any = inputs.get("layout")

    def attend(*args: Any) -> Tensor:
        trace.attended.update(running_now)
        return Packed.attend(layout, *args)

    if layout is not None:
        layout.attend = attend

    def before(name: str) -> Callable[..., None]:
        def keep(_: Any, args: Any, kwargs: Any) -> None:
            running_now.append(name)
            trace.inputs.setdefault(name, {**dict(enumerate(args)), **kwargs})

        return keep

    def after(name: str) -> Callable[..., None]:
        def keep(_: Any, __: Any, output: Any) -> None:
            running_now.pop()
            trace.outputs.setdefault(name, output)

        return keep

    hooks = []
    for name, module in backbone.named_modules():
        if name:
            hooks.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
            hooks.append(module.register_forward_hook(after(name)))
    try:
        with Float32():
            backbone(use_cache=False, **inputs)
    except Exception:  # a model may fail in any way
        trace.failed = running_now[::-1]
    finally:
        for handle in hooks:
            handle.remove()
    return trace


def _agree(together: Any, alone: list[Any], dims: tuple[int, ...] = (1, 0)) -> bool | None:
    """Whether all tensors with a token dimension (one of `dims`) are equal in the pack and in its sequences. None:
    there are no such tensors."""
    found = [
        torch.allclose(_wide(one), _wide(expected), rtol=1e-3, atol=1e-3)
        for one, parts in _pairs(together, alone)
        for expected in [_side_by_side(one, parts, dims)]
        if expected is not None
    ]
    return all(found) if found else None


def _wide(values: Tensor) -> Tensor:
    return values if values.is_complex() else values.float()  # rotary embeddings may be complex


def _pairs(together: Any, alone: list[Any]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Tensors in the arguments or output of a pack, each with the corresponding tensors of the separate sequences."""
    if any(type(part) is not type(together) for part in alone):
        return
    if isinstance(together, Tensor):
        yield together, alone
    elif isinstance(together, dict):
        for place in together:
            if all(place in part for part in alone):
                yield from _pairs(together[place], [part[place] for part in alone])
    elif isinstance(together, tuple | list) and together and all(isinstance(size, int) for size in together):
        yield torch.zeros(*together), [torch.zeros(*part) for part in alone]  # the shape of the token ids
    elif isinstance(together, tuple | list):
        for values in zip(together, *alone, strict=False):
            yield from _pairs(values[0], [*values[1:]])


def _side_by_side(one: Tensor, parts: list[Tensor], dims: tuple[int, ...]) -> Tensor | None:
    """The sequences' tensors concatenated to the shape of the pack's: [1, N, ...], or [N, ...] for positions."""
    for dim in dims:
        others = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in (one, *parts)}
        if one.dim() > dim and len(others) == 1 and sum(part.shape[dim] for part in parts) == one.shape[dim]:
            return torch.cat(parts, dim)
    return None
