"""Slots of a pool: how many items may run at a time, whichever worker runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Slot:
    """One worker's claim to a slot. There are as many slots as workers; a slow item gives its slot up to another."""

    def __init__(self, slots: threading.Semaphore, on_release: Callable[[], None]):
        self._slots, self._on_release, self._held = slots, on_release, False

    def acquire(self) -> None:
        """Waits for a free slot, unless one is held already."""
        if not self._held:
            self._slots.acquire()
            self._held = True

    def release(self) -> None:
        """Gives the slot up, if one is held."""
        if self._held:
            self._held = False
            self._slots.release()
            self._on_release()
