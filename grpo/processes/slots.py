"""Slots of a pool: limit how many items run at a time, in any of its workers."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Slot:
    """One worker's claim to a slot. There are as many slots as regular workers; a slow item gives up its slot."""

    def __init__(self, slots: threading.Semaphore, on_release: Callable[[], None]):
        self._slots, self._on_release, self._held = slots, on_release, False

    def acquire(self) -> None:
        """Waits for a free slot, unless one is already held."""
        if not self._held:
            self._slots.acquire()
            self._held = True

    def release(self) -> None:
        """Gives up the slot, if one is held."""
        if self._held:
            self._held = False
            self._slots.release()
            self._on_release()
