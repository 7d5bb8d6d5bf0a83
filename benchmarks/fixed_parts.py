"""What benchmarks/fleet.py compares with: each endpoint owns a part of the requests, and nobody takes it over."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from benchmarks.fleet_simulator import SLOTS
from grpo.http.client import Away
from grpo.http.connections import Cancellation
from grpo.http.fleet.member import Member
from grpo.http.fleet.members import Members

_AGAIN_S = 1.0


class FixedParts:
    """In place of a `Fleet`: request i goes to endpoint i modulo their number, until it is answered."""

    def __init__(self, members: Members, send: Callable[..., Any], retries: int, copy_after: float | None):
        self._members, self._send = [*members], send
        self._pools = [ThreadPoolExecutor(SLOTS) for _ in self._members]

    def answers(self, items: Iterable[Any]) -> Generator[tuple[int, Any], None, None]:
        count = len(self._members)
        futures = {
            self._pools[index % count].submit(self._ask, self._members[index % count], item): index
            for index, item in enumerate(items)
        }
        for future in as_completed(futures):
            yield futures[future], future.result()

    def _ask(self, member: Member, item: Any) -> Any:
        while True:
            try:
                return self._send(member, item, Cancellation())
            except Away:
                time.sleep(_AGAIN_S)

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()
