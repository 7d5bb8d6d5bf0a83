"""The typical time of a request, from which a straggler differs."""

from __future__ import annotations

import statistics
from collections import deque

MIN_ANSWERS = 16
"""Fewer answers have no typical time."""
_KEPT = 512


class TypicalTime:
    """Median time of the last answers."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float | None:
        """None before MIN_ANSWERS answers."""
        return statistics.median(self._seconds) if len(self._seconds) >= MIN_ANSWERS else None
