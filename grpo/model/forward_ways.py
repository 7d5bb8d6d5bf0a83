"""Chooses how a model runs when it is loaded: packed, packed with some modules by rows, or plain."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from grpo.config.common import Hardware
from grpo.errors import InputError
from grpo.model.first_difference import first_difference
from grpo.model.fused.blocks import fuse_blocks
from grpo.model.fused.layers import fuse, unfuse
from grpo.model.lm_head import backbone_of, is_policy
from grpo.model.packed.attention import NAME, UNFUSED, is_unfused
from grpo.model.packed.by_rows import run_by_rows, runs_by_rows
from grpo.model.packed.index_positions import give_positions, noted_ranges, take_positions
from grpo.model.plain import generates_alone
from grpo.model.probe import (
    Weights,
    attention_as,
    check_gradients,
    decoded_difference,
    generated_difference,
    logprob_difference,
    own_logprobs,
    own_scores,
    packed_states,
    score_difference,
    set_attention,
)

Compare = Callable[[Any, list[Tensor]], str | None]
UNCHANGED = 1e-5
"""Largest change of hidden states, relative to the largest of them, that is rounding."""


@dataclass(frozen=True)
class Way:
    """How a model runs."""

    packed: bool
    problem: str | None  # what the packed pass gets wrong, if the model therefore runs plain
    by_rows: tuple[str, ...]  # class names of modules that run by rows
    decodes: bool  # whether it can also decode packed
    writes: bool = False  # whether a forward pass writes to weights, in the blocks at hand without changing them
    alone: bool = False  # whether transformers' `generate` is right for one sequence at a time only

    @property
    def by_transformers(self) -> str:
        """What transformers' own code does in a packed model, and whether it generates one sequence at a time, in a few
        words; '' if nothing."""
        rows = f"{', '.join(self.by_rows)} on rows of one sequence" if self.packed and self.by_rows else ""
        alone = ", one sequence at a time, because it mixes up several" if self.alone else ""
        generates = (self.packed and not self.decodes) or self.alone
        return "; ".join(filter(None, [rows, f"sampled by transformers' generate{alone}" if generates else ""]))


def choose_way(loaded: Any, model: str, hardware: Hardware) -> Way:
    """Chooses the fastest way whose outputs equal those of transformers' forward pass, and prepares the model for it.

    Tries in order: packed; plain with transformers' fastest attention; plain with eager attention.

    Raises InputError if transformers cannot run the model, or changes its weights, or if no way gives the right
    outputs.
    """
    own, compare = (own_logprobs, logprob_difference) if is_policy(loaded) else (own_scores, score_difference)
    backbone = backbone_of(loaded)
    fastest = backbone.config._attn_implementation
    loaded.eval()
    weights = Weights(loaded)
    try:
        set_attention(loaded, "eager")
        expected = own(loaded)
        check_gradients(loaded)
    except Exception as error:  # any model may fail in any way
        raise InputError(f"{model}: transformers cannot run this model here: {_in_one_line(error)}") from error
    if name := weights.changed:
        raise InputError(
            f"{model}: transformers' forward pass changes this model's weights ({name}), so that other ones would be "
            "saved; docs/models.md says what to do"
        )
    writes = bool(weights.written)
    packed = NAME if hardware.fused else UNFUSED
    ways = {"auto": (packed, fastest, "eager"), "packed": (packed,), "plain": (fastest, "eager")}[hardware.attention]
    reasons: list[str] = []
    for way in ways:
        set_attention(loaded, way)
        own_attention = fastest if way == packed else way
        if way == packed:
            problem = _packed_problem(loaded, expected, compare, fastest)
        else:
            problem = _problem(loaded, expected, compare)
        decodes = way == packed and problem is None and is_policy(loaded) and _decodes(loaded, expected)
        if problem is None and is_policy(loaded) and not decodes:
            own_attention, problem = _generates(loaded, expected, (own_attention, "eager"))
        if problem is None:
            backbone.own_attention = own_attention
            by_rows = sorted({type(module).__name__ for module in backbone.modules() if runs_by_rows(module)})
            reason, alone = reasons[0] if way != packed and reasons else None, generates_alone(loaded)
            return Way(way == packed, reason, tuple(by_rows), decodes, writes, alone)
        unfuse(loaded)
        reasons.append(problem)
    what = f"hardware.attention = {hardware.attention!r} computes something else"
    raise InputError(f"{model}: {what}: {'; '.join(dict.fromkeys(reasons))}")


def _packed_problem(loaded: Any, expected: list[Tensor], compare: Compare, own_attention: str) -> str | None:
    """What the model gets wrong when packed, after the modules that need it were set to run by rows with the attention
    implementation `own_attention`."""
    backbone = backbone_of(loaded)
    if not is_unfused(backbone):
        fuse(loaded)
        fuse_blocks(loaded)
    tried: set[type] = set()  # classes whose modules got positions, for good or not
    while True:
        with noted_ranges(backbone) as ranges:
            problem = _problem(loaded, expected, compare)
        if problem is None:
            return _try_positions(loaded, expected, compare, ranges)
        first = first_difference(loaded, lambda: attention_as(loaded, "eager"))
        if first is None:
            return f"{problem}, in {_blamed(loaded, expected, compare)}"
        module = backbone.get_submodule(first.name)
        alike = [other for other in backbone.modules() if type(other) is type(module)]
        if module in ranges and type(module) not in tried:
            tried.add(type(module))
            for other in alike:
                give_positions(other, ranges.get(other, set()))
            then = first_difference(loaded, lambda: attention_as(loaded, "eager"))
            if then is not None and not f"{then.name}.".startswith(f"{first.name}."):
                continue  # another module differs
            if then is None and _problem(loaded, expected, compare) is None:
                continue
            take_positions(alike)
        if first.attends or runs_by_rows(module):
            return f"{problem}, first in {first.name}"
        run_by_rows(alike, first.given, own_attention)


def _try_positions(
    loaded: Any, expected: list[Tensor], compare: Compare, ranges: Mapping[nn.Module, set[int]]
) -> str | None:
    """Gives the positions in their sequences to modules that made `ranges` over the tokens of a pack. The outputs are
    right without, but positions may count only beyond the probe's short sequences. Ranges that order or gather tokens
    stay as they are: with positions in their place the outputs become wrong. Returns what cannot be decided."""
    for kind in {type(module): None for module in ranges}:
        modules = [module for module in ranges if type(module) is kind]
        before = packed_states(loaded)
        for module in modules:
            give_positions(module, ranges[module])
        problem = _problem(loaded, expected, compare)
        if problem is None:
            change = (packed_states(loaded) - before).abs().max().item()
            if change <= UNCHANGED * before.abs().max().item():
                continue
            problem = f"{kind.__name__} numbers the tokens of a pack, to a small effect"
            take_positions(modules)
            return problem
        take_positions(modules)
    return None


def _decodes(loaded: Any, expected: list[Tensor]) -> bool:
    """Whether a packed model can also decode packed. Stores the answer on the backbone."""
    backbone = backbone_of(loaded)
    backbone.decodes_packed = _problem(loaded, expected, decoded_difference) is None
    return bool(backbone.decodes_packed)


def _generates(loaded: Any, expected: list[Tensor], ways: tuple[str, ...]) -> tuple[str, str | None]:
    """The first of `ways` with which `generate` is right, and None; or the first of all, and what differs. Prefers to
    generate a whole batch, but some models mix up its rows. Stores on the backbone if each is generated alone."""
    problems, backbone = [], backbone_of(loaded)
    for backbone.generates_alone in (False, True):
        for way in dict.fromkeys(ways):
            with attention_as(loaded, way):
                problems.append(_problem(loaded, expected, generated_difference))
            if problems[-1] is None:
                return way, None
    return ways[0], problems[0]


def _problem(loaded: Any, expected: list[Tensor], compare: Compare) -> str | None:
    try:
        return compare(loaded, expected)
    except Exception as error:  # any model may fail in any way
        return _in_one_line(error)


def _blamed(loaded: Any, expected: list[Tensor], compare: Compare) -> str:
    """The innermost module that fails; the model itself, if none does although the outputs differ."""
    backbone = backbone_of(loaded)
    names = {id(module): name for name, module in backbone.named_modules()}
    found = ""
    try:
        compare(loaded, expected)
    except Exception as error:  # any model may fail in any way
        for frame, _ in traceback.walk_tb(error.__traceback__):
            found = names.get(id(frame.f_locals.get("self")), found)
    return found or f"the forward pass of {type(backbone).__name__} itself"


def _in_one_line(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200)
