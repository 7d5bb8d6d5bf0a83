"""A rate limit: when the next request to a service may start."""

from __future__ import annotations

import math
import threading
import time


class Pace:
    """Spreads `per_minute` requests evenly, and pauses when the service asks for it. Thread-safe."""

    def __init__(self, per_minute: float | None = None):
        """`per_minute`: None for no limit."""
        self._gap_s = 60 / per_minute if per_minute else 0.0
        self._next = -math.inf
        self._lock = threading.Lock()

    def wait(self, stop: threading.Event) -> None:
        """Blocks until the next request may start, or `stop` is set."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next)
            self._next = start + self._gap_s
        if start > now:
            stop.wait(start - now)

    @property
    def delay_s(self) -> float:
        """Seconds until the next request may start; 0 or less: now."""
        return self._next - time.monotonic()

    def hold(self, seconds: float) -> None:
        """Lets no request start for the next `seconds`."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)
