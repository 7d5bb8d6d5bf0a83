"""Shuffled orders determined by a name, so that a resumed job reads its data in the same order as the first run."""

from __future__ import annotations

import functools
import random


@functools.lru_cache(maxsize=64)
def permutation(size: int, name: str) -> list[int]:
    """Returns the indices 0 to size - 1 in an order that depends only on `name`. The list is cached: do not edit it."""
    order = list(range(size))
    random.Random(name).shuffle(order)
    return order
