"""One endpoint of a fleet: its client, its health and its limit."""

from __future__ import annotations

import functools
import logging
from urllib.parse import urlsplit

from grpo.http.client import Away, Http, Refused
from grpo.http.fleet.adaptive_limit import AdaptiveLimit
from grpo.http.fleet.health import EndpointHealth
from grpo.http.rate_limit import Pace

logger = logging.getLogger(__name__)

_PROBE_S = 10.0
_ALIVE = ("501",)
"""Statuses above 499 with which a service says that it has no list of models, not that it is failing."""
_OVERLOADED = ("408", "429", "503", "timeout")
_ASKS_FOR_A_PAUSE = ("429",)
_LATEST = 0.2
"""Weight of an answer in a member's mean time."""


class Member:
    """An endpoint as the fleet sees it. Not thread-safe, except for `http` and `probe`."""

    def __init__(self, url: str, timeout_s: float, key: str | None, most: int, per_minute: float | None):
        """`most`: maximum number of requests in flight. `per_minute`: rate limit; None for none."""
        self.url = url
        self.path = urlsplit(url).path.rstrip("/")
        self.http = Http(url, timeout_s, 0, key, proxy=True, repeatable=True)
        self._probes: Http | None = None
        self._make_probes = functools.partial(Http, url, min(_PROBE_S, timeout_s), 0, key, proxy=True)
        self.health, self.limit, self.pace = EndpointHealth(), AdaptiveLimit(most), Pace(per_minute)
        self.in_flight = 0
        self.mean_s = 0.0
        """Mean time of its last answers, seconds; 0 before the first."""
        self.fault = "no request was answered"
        """The last failure."""
        self.probing = False
        self.retired = False
        """Whether the list of addresses no longer has it: it finishes what it has."""

    def is_free(self, now: float) -> bool:
        """Whether it may get one more request now."""
        return (
            not self.retired
            and self.in_flight < self.limit.requests
            and self.health.is_up(now)
            and self.pace.delay_s <= 0
        )

    @property
    def load(self) -> tuple[float, float]:
        """Of two free endpoints, the smaller load gets the next request: the emptier one, then the faster one."""
        return self.in_flight / self.limit.requests, self.mean_s

    def answered(self, seconds: float) -> None:
        self.limit.answered(self.in_flight)
        self.mean_s += (_LATEST if self.mean_s else 1.0) * (seconds - self.mean_s)
        if self.health.out:
            logger.info("engine: %s is back", self.url)
        self.health.answered()

    def failed(self, fault: Away | Refused, sent: float, now: float) -> None:
        """Counts a failure that another endpoint might not have had."""
        self.fault = str(fault)
        kind = fault.kind if isinstance(fault, Away) else "refused"
        if kind in _OVERLOADED:
            self.limit.overloaded(sent, now)
        if kind in _ASKS_FOR_A_PAUSE or (isinstance(fault, Away) and fault.wait_s is not None):
            self.health.refused_load(sent, now, fault.wait_s if isinstance(fault, Away) else None)
        elif self.health.failed(sent, now):
            logger.warning("engine: %s is out for now: %s", self.url, fault)

    def overtaken(self, sent: float, now: float) -> None:
        """Counts a request that another endpoint answered although it got it much later: a sign that this one hangs."""
        if self.health.failed(sent, now):
            logger.warning("engine: %s is out for now: other endpoints answer what it does not", self.url)

    def probe(self) -> bool:
        """Whether it answers a cheap request, for its list of models. Takes at most ten seconds."""
        self._probes = self._probes or self._make_probes()
        try:
            self._probes.get(f"{self.path}/models")
        except Refused:
            return True
        except Away as fault:
            return fault.kind in _ALIVE
        return True

    def close(self) -> None:
        """Aborts its requests."""
        self.http.abandon()
        if self._probes is not None:
            self._probes.abandon()
