"""The layout of the current forward pass, for modules to which transformers passes no extra arguments.

A model also gets its layout as the argument `layout`, which most architectures pass on to their attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from grpo.distributed.sequence_group import SequenceGroup, sequence_group, sharing_tokens

_LAYOUT: ContextVar[Any] = ContextVar("layout", default=None)
_POSITIONS: ContextVar[Tensor | None] = ContextVar("positions", default=None)


def current_layout() -> Any:
    """The layout of the current forward pass; None: a plain transformers forward pass."""
    return _LAYOUT.get()


def current_positions() -> Tensor | None:
    """The positions [N] of the current forward pass's tokens in their sequences; None: they are counted as usual."""
    return _POSITIONS.get()


@contextmanager
def running(layout: Any, positions: Tensor | None = None) -> Iterator[None]:
    """Context in which `layout` is the current layout and `positions` [N] are those of its tokens."""
    token, of_positions = _LAYOUT.set(layout), _POSITIONS.set(positions)
    try:
        yield
    finally:
        _LAYOUT.reset(token)
        _POSITIONS.reset(of_positions)


def same_layout() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` for `torch.utils.checkpoint`: a recomputed layer uses the layout of its original forward pass, and
    shares its tokens among the same processes."""
    return nullcontext(), _again(_LAYOUT.get(), _POSITIONS.get(), sequence_group())


@contextmanager
def _again(layout: Any, positions: Tensor | None, group: SequenceGroup | None) -> Iterator[None]:
    with running(layout, positions), sharing_tokens(group):
        yield
