"""The layout of the current forward pass, for modules to which transformers passes no extra arguments.

A model also gets its layout as the argument `layout`, which most architectures pass on to their attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from grpo.distributed.sequence_group import SequenceGroup, sequence_group, sharing_tokens

_LAYOUT: ContextVar[Any] = ContextVar("layout", default=None)


def current_layout() -> Any:
    """The layout of the current forward pass; None: a plain transformers forward pass."""
    return _LAYOUT.get()


@contextmanager
def running(layout: Any) -> Iterator[None]:
    """Context in which `layout` is the current layout."""
    token = _LAYOUT.set(layout)
    try:
        yield
    finally:
        _LAYOUT.reset(token)


def same_layout() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` for `torch.utils.checkpoint`: a recomputed layer uses the layout of its original forward pass, and
    shares its tokens among the same processes."""
    return nullcontext(), _again(_LAYOUT.get(), sequence_group())


@contextmanager
def _again(layout: Any, group: SequenceGroup | None) -> Iterator[None]:
    with running(layout), sharing_tokens(group):
        yield
