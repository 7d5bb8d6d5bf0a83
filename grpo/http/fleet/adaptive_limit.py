"""Back-pressure: how many requests an endpoint gets at once, adapted to what it can take (AIMD, as in TCP)."""

from __future__ import annotations

import math


class AdaptiveLimit:
    """One more request after as many answers as are in flight; half as many after an overload.

    It begins at the maximum: an endpoint that takes it all loses no time, and one that does not says so at once.
    """

    def __init__(self, most: int):
        """`most`: maximum number of requests in flight, at least 1."""
        self._most, self._limit = most, float(most)
        self._lowered_at = -math.inf

    @property
    def requests(self) -> int:
        """Requests that may be in flight now, at least 1."""
        return int(self._limit)

    def answered(self, in_flight: int) -> None:
        """Counts an answer that arrived while `in_flight` requests were in flight, itself included. An endpoint that
        was not full has not shown that it can take more."""
        if in_flight >= self.requests:
            self._limit = min(self._most, self._limit + 1 / self._limit)

    def overloaded(self, sent: float, now: float) -> None:
        """Halves the limit because of a request sent at `sent` (time.monotonic), once for all that were in flight."""
        if sent >= self._lowered_at:
            self._limit = max(1.0, self._limit / 2)
            self._lowered_at = now
