"""The layout of the forward pass that is running, for modules that transformers hands no further arguments.

A layout also goes to a model as the argument `layout`, which most architectures hand on to their attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

_LAYOUT: ContextVar[Any] = ContextVar("layout", default=None)


def current_layout() -> Any:
    """The layout of the forward pass that is running; None: transformers' own."""
    return _LAYOUT.get()


@contextmanager
def running(layout: Any) -> Iterator[None]:
    """Within it `layout` is the current one."""
    token = _LAYOUT.set(layout)
    try:
        yield
    finally:
        _LAYOUT.reset(token)


def same_layout() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of `torch.utils.checkpoint`: a recomputed layer has the layout of its forward pass."""
    return nullcontext(), running(_LAYOUT.get())
