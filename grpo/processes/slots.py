"""How many items of a pool may begin at a time, whoever works on them."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Place:
    """The right to begin an item. As many as there are workers; a slow item leaves its own to another."""

    def __init__(self, places: threading.Semaphore, helped: Callable[[], None]):
        self._places, self._help, self._held = places, helped, False

    def take(self) -> None:
        if not self._held:
            self._places.acquire()
            self._held = True

    def leave(self) -> None:
        if self._held:
            self._held = False
            self._places.release()
            self._help()
