"""Gives positions to modules that count them themselves, by `torch.arange` over their tokens, as some layers of Llama 4
do. Such a module would count through a whole pack, or through the rows of a decoding step.

`grpo.model.forward_ways` tries this for all modules that make such a range: others use it to sort or to gather tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from grpo.model.packed.attention import Packed
from grpo.model.packed.current import current_layout, current_positions

_ARANGE = torch.arange
Calls = frozenset[int]
"""Which of a module's calls of `torch.arange` in a forward pass, counted from 0."""


@contextmanager
def noted_ranges(backbone: nn.Module) -> Iterator[dict[nn.Module, set[int]]]:
    """Context that notes which modules make a range over all tokens of a pack, and by which of their calls. Modules in
    `backbone` only: its own ranges go to modules that a short pack already checks."""
    found: dict[nn.Module, set[int]] = defaultdict(set)
    noting = _Noting(found)
    inner = [module for module in backbone.modules() if module is not backbone]
    hooks = [module.register_forward_pre_hook(noting.enter) for module in inner]
    hooks += [module.register_forward_hook(noting.leave) for module in inner]
    torch.arange = noting.arange  # after a mode of torch functions, all that follows was slower
    try:
        yield found
    finally:
        torch.arange = _ARANGE
        for hook in hooks:
            hook.remove()


def give_positions(module: nn.Module, calls: set[int]) -> None:
    """Makes a module's `calls` of `torch.arange` return the positions of its tokens in their sequences."""
    module.range_calls = frozenset(calls)  # type: ignore[assignment]
    module.forward = MethodType(_with_positions, module)


def take_positions(modules: Iterable[nn.Module]) -> None:
    """Undoes `give_positions`."""
    for module in modules:
        del module.range_calls
        del module.forward


def _with_positions(self: Any, *args: Any, **kwargs: Any) -> Any:
    positions = current_positions()
    if positions is None:  # a plain forward pass, or rows of one sequence each
        return type(self).forward(self, *args, **kwargs)
    with _Giving(positions, self.range_calls):
        return type(self).forward(self, *args, **kwargs)


class _Noting:
    def __init__(self, found: dict[nn.Module, set[int]]):
        self.found = found
        self.running = list[list[Any]]()  # module and calls so far, outer modules first

    def enter(self, module: nn.Module, _: Any) -> None:
        self.running.append([module, 0])

    def leave(self, _: nn.Module, __: Any, ___: Any) -> None:
        self.running.pop()

    def arange(self, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = _ARANGE(*args, **kwargs)
        if self.running:
            (module, made), layout = self.running[-1], current_layout()
            if isinstance(layout, Packed) and _is_index(result, layout.tokens) and "forward" not in vars(module):
                self.found[module].add(made)
            for frame in self.running:  # as `_Giving` counts: calls of the modules inside, too
                frame[1] += 1
        return result


def _is_index(values: Tensor, tokens: int) -> bool:
    return values.shape == (tokens,) and values.tolist() == [*range(tokens)]


class _Giving(TorchFunctionMode):
    def __init__(self, positions: Tensor, calls: Calls):
        super().__init__()
        self.positions, self.calls, self.made = positions, calls, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _ARANGE:
            self.made += 1
            if self.made - 1 in self.calls:
                if result.shape != self.positions.shape:
                    raise RuntimeError(f"a range of {result.shape} numbers, where one over all tokens was expected")
                return self.positions.to(result, copy=True)
        return result
