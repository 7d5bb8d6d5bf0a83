"""The endpoints of a fleet: which of them gets a request, which of them are probed, and whether any is left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator

from grpo.http.client import Away
from grpo.http.fleet.addresses import Addresses
from grpo.http.fleet.member import Member

logger = logging.getLogger(__name__)


class Members:
    """Follows the list of addresses. Not thread-safe."""

    def __init__(self, addresses: Addresses, make: Callable[[str], Member], retries: int):
        """`make` makes the endpoint of an address. `retries`: pauses in a row after which an endpoint is gone."""
        self._addresses, self._make, self._retries = addresses, make, retries
        self._by_url = {url: make(url) for url in addresses.current}

    def __iter__(self) -> Iterator[Member]:
        return (member for member in self._by_url.values() if not member.retired)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def choose(self, now: float, rather_not: Collection[Member], never: Collection[Member] = ()) -> Member | None:
        """The endpoint for a request: the least loaded one that is free, `rather_not` one at which it failed. None if
        all are busy or out."""
        free = (member for member in self if member.is_free(now) and member not in never)
        return min(free, key=lambda member: (member in rather_not, *member.load), default=None)

    def check_left(self, fault: Away) -> None:
        """Raises Away with the last `fault` if every endpoint is gone."""
        if all(member.health.pauses > self._retries for member in self):
            raise Away(
                str(fault) if len(self) == 1 else f"none of the {len(self)} endpoints answers; the last: {fault}"
            )

    def refresh(self, now: float) -> None:
        """Adds the endpoints that are new in the list; those that have left it finish what they have."""
        if not self._addresses.refresh(now):
            return
        current = self._addresses.current
        for url, member in self._by_url.items():
            member.retired = url not in current
        for url in current:
            if url not in self._by_url:
                self._by_url[url] = self._make(url)
        logger.info("engine: %d endpoints now", len(current))

    def close(self) -> None:
        for member in self._by_url.values():
            member.close()
