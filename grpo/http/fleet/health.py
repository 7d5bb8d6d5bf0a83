"""Health of one endpoint: whether it may get requests, and for how long it gets none after failures."""

from __future__ import annotations

import math

from grpo.http.client import backoff

OUT_AFTER = 3
"""Failures in a row after which an endpoint is out."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class EndpointHealth:
    """An endpoint is up, paused because it asked for that, or out until a probe succeeds.

    Times are of time.monotonic, in seconds. Pauses double with every pause since the last answer. Requests that were
    sent before a pause began say nothing new if they fail: of 64 in flight when an endpoint dies, three count.
    """

    def __init__(self) -> None:
        self.out = False
        self.pauses = 0
        """Pauses and failed probes since the last answer."""
        self._failures = 0
        self._paused_at = self._resumes = -math.inf

    def is_up(self, now: float) -> bool:
        """Whether it may get a request."""
        return not self.out and now >= self._resumes

    def needs_probe(self, now: float) -> bool:
        return self.out and now >= self._resumes

    def answered(self) -> None:
        """Ends an outage; a pause that it asked for lasts."""
        if self.out:
            self._resumes = -math.inf
        self.out, self.pauses, self._failures = False, 0, 0

    def failed(self, sent: float, now: float) -> bool:
        """Counts the failure of a request sent at `sent`. Returns whether the endpoint is out because of it."""
        if self.out or sent < self._paused_at:
            return False
        self._failures += 1
        if self._failures < OUT_AFTER:
            return False
        self.out = True
        self._pause(now, None)
        return True

    def refused_load(self, sent: float, now: float, wait_s: float | None) -> bool:
        """Pauses it because it has too much to do; `wait_s`: seconds it asked for. Returns whether that was news."""
        if self.out or sent < self._paused_at:
            return False
        self._pause(now, wait_s)
        return True

    def probed(self, alive: bool, now: float) -> None:
        """Ends the outage, or prolongs it. After a good probe, one failure is enough for the next outage."""
        if not self.out:
            return  # a late answer has ended the outage
        if alive:
            self.out, self._failures = False, OUT_AFTER - 1
        else:
            self._pause(now, None)

    def _pause(self, now: float, wait_s: float | None) -> None:
        pause_s = backoff(self.pauses, _FIRST_PAUSE_S, _LONGEST_PAUSE_S) if wait_s is None else wait_s
        self.pauses += 1
        self._paused_at, self._resumes = now, now + pause_s
