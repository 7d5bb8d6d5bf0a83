"""Orders that are fixed by a name, so that a resumed job goes through its data as the first run would have."""

from __future__ import annotations

import functools
import random


@functools.lru_cache(maxsize=64)
def permutation(size: int, name: str) -> list[int]:
    """Returns the indices 0 to size - 1 in an order that `name` alone determines. Shared: do not change it."""
    order = list(range(size))
    random.Random(name).shuffle(order)
    return order
