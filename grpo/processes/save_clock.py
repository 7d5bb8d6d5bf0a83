"""Bounds how much work a killed job repeats, in time: steps of a large model take minutes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

LONGEST_S = 600.0
"""Seconds without a checkpoint."""
COST = 0.05
"""Largest share of the time that such checkpoints may take: those of a large model are written for minutes."""


class SaveClock:
    """Tells when a checkpoint is due however few steps were taken since the last."""

    def __init__(self) -> None:
        self._saved, self._took = monotonic(), 0.0

    @property
    def due(self) -> bool:
        return monotonic() - self._saved >= max(LONGEST_S, self._took / COST)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context in which a checkpoint is written, for whatever reason."""
        began = monotonic()
        yield
        self._saved = monotonic()
        self._took = self._saved - began
