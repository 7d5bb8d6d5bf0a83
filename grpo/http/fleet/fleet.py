"""Spreads requests over endpoints that serve the same model.

No endpoint owns a part of the requests: each takes the next one when it has room, so what one leaves others take. A
request that fails goes back to the front. When nothing waits, idle endpoints get a copy of the requests that take much
longer than usual; the first answer counts and the other copies are cancelled. So each request has one result, whatever
happens to the endpoints.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic

from grpo.http.client import Away, Refused
from grpo.http.connections import Cancellation
from grpo.http.fleet.member import Member
from grpo.http.fleet.members import Members
from grpo.http.fleet.request import Attempt, Item, Request, RequestBatch, Result
from grpo.http.fleet.typical_time import TypicalTime

logger = logging.getLogger(__name__)

MOST_IN_FLIGHT = 4096
"""Requests in flight in one process, each with a thread of its own."""
_COPIES = 3
"""Endpoints that work on the same request, at most."""
_TICK_S = 0.05
_NOT_ITS_FAULT = ("unreachable", "429")
"""Failures that cannot be due to the request: the service was not reached, or had too much to do."""


class Fleet(Generic[Item, Result]):
    """Any thread may call it. `counts`: requests sent, answered, failed, refused, copied to another endpoint because
    they took long, and overtaken by such a copy."""

    def __init__(
        self,
        members: Members,
        send: Callable[[Member, Item, Cancellation], Result],
        retries: int,
        copy_after: float | None,
    ):
        """`send` gets one answer from an endpoint, or raises Refused or Away. `retries`: how often a request is sent
        again after failures. `copy_after`: multiple of the typical time after which a request is copied to an idle
        endpoint; None: never."""
        self.members, self._send, self._retries, self._copy_after = members, send, retries, copy_after
        self.counts: Counter[str] = Counter()
        self._waiting: list[Request[Item, Result]] = []
        self._in_flight: set[Attempt[Item, Result]] = set()
        self._batches = itertools.count()
        self._typical = TypicalTime()
        self._error: Exception | None = None
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._threads = ThreadPoolExecutor(MOST_IN_FLIGHT + len(members), "endpoint")
        self._ticker = threading.Thread(target=self._tick_until_closed, name="fleet", daemon=True)
        self._ticker.start()

    def answers(self, items: Iterable[Item]) -> Generator[tuple[int, Result], None, None]:
        """Yields (index, result) of each item once, as they come. Requests of earlier calls go first.

        Raises:
            Refused: two endpoints refused a request, or the only one did.
            Away: a request failed more than `retries` times, or no endpoint answers any more.
        """
        batch: RequestBatch[Result] = RequestBatch(next(self._batches))
        requests = [Request(batch, index, item) for index, item in enumerate(items)]
        self._submit(requests)
        try:
            for _ in requests:
                index, result = batch.answers.get()
                if isinstance(result, Exception):
                    raise result
                yield index, result
        finally:  # the caller may have stopped iterating
            self._cancel(batch)

    def close(self) -> None:
        """Aborts everything: waiting callers of `answers` get Away."""
        with self._lock:
            self._fail_all(Away("the engine was closed"))
            self._closed.set()
            self.members.close()
            for attempt in self._in_flight:
                attempt.cancellation.cancel()
        self._threads.shutdown()
        self._ticker.join()
        logger.info("engine: requests: %s", ", ".join(f"{count} {name}" for name, count in self.counts.items()))

    def _submit(self, requests: list[Request[Item, Result]]) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            for request in requests:
                heapq.heappush(self._waiting, request)
            self._start_waiting(time.monotonic())

    def _cancel(self, batch: RequestBatch[Result]) -> None:
        with self._lock:
            batch.cancelled = True
            for attempt in self._in_flight:
                if attempt.request.batch is batch:
                    attempt.cancellation.cancel()

    def _start_waiting(self, now: float) -> None:
        """Starts as many requests as the endpoints have room for."""
        while self._waiting:
            request = self._waiting[0]
            if not request.done:  # else it was cancelled
                member = self.members.choose(now, rather_not=request.failed_at)
                if member is None or len(self._in_flight) >= MOST_IN_FLIGHT:
                    return
                self._start(request, member, now)
            heapq.heappop(self._waiting)

    def _start(self, request: Request[Item, Result], member: Member, now: float) -> None:
        member.pace.wait(self._closed)  # does not block, because the member is free
        attempt = Attempt(request, member, now)
        self._threads.submit(self._attempt, attempt)
        request.attempts.append(attempt)
        self._in_flight.add(attempt)
        member.in_flight += 1
        self.counts["sent"] += 1

    def _attempt(self, attempt: Attempt[Item, Result]) -> None:
        """One request at one endpoint, in a thread of its own."""
        outcome: Result | Exception
        try:
            outcome = self._send(attempt.member, attempt.request.item, attempt.cancellation)
        except Exception as error:
            outcome = error
        with self._lock:
            try:
                self._finish(attempt, outcome)
                self._start_waiting(time.monotonic())
            except Exception as error:  # for example no thread can be started: an error is better than waiting forever
                self._fail_all(error)

    def _finish(self, attempt: Attempt[Item, Result], outcome: Result | Exception) -> None:
        request, member, now = attempt.request, attempt.member, time.monotonic()
        self._in_flight.discard(attempt)
        request.attempts.remove(attempt)
        if not isinstance(outcome, Exception):
            member.answered(now - attempt.sent)
            self._typical.add(now - attempt.sent)
        elif isinstance(outcome, (Away, Refused)) and not attempt.cancellation.cancelled:
            member.failed(outcome, attempt.sent, now)
        member.in_flight -= 1
        if request.done:
            return
        if isinstance(outcome, (Away, Refused)):
            self._failed(request, member, outcome)
            return
        request.answer(outcome)  # an exception of another kind is an error in `send`
        self.counts["answered"] += 1
        for other in request.attempts:
            other.cancellation.cancel()
            if other.sent < attempt.sent:
                self.counts["overtaken"] += 1
                other.member.overtaken(other.sent, now)

    def _failed(self, request: Request[Item, Result], member: Member, error: Away | Refused) -> None:
        """Sends a failed request again, unless there is no hope or a copy of it is under way."""
        request.failed_at.append(member)
        if isinstance(error, Refused) and member not in request.refused_by:
            self.counts["refused"] += 1
            request.refused_by.append(member)
            if len(self.members) > 1:
                error.url = member.url
        else:
            self.counts["failed"] += 1
            request.failures += isinstance(error, Refused) or error.kind not in _NOT_ITS_FAULT
        if not request.attempts:
            if len(request.refused_by) > min(1, len(self.members) - 1):
                request.answer(error)
            elif request.failures > self._retries:
                times = "" if request.failures == 1 else f" {request.failures} times; the last"
                request.answer(Away(f"a request failed{times}: {error}"))
            else:
                heapq.heappush(self._waiting, request)
        if isinstance(error, Away):
            self.members.check_left(error)

    def _fail_all(self, error: Exception) -> None:
        """Ends every request with an error, now and later."""
        self._error = self._error or error
        for request in [*self._waiting, *(attempt.request for attempt in self._in_flight)]:
            if not request.done:
                request.answer(self._error)
        self._waiting.clear()

    def _tick_until_closed(self) -> None:
        while not self._closed.wait(_TICK_S):
            with self._lock:
                try:
                    if (self._waiting or self._in_flight) and not self._closed.is_set():
                        self._tick(time.monotonic())
                except Exception as error:
                    self._fail_all(error)

    def _tick(self, now: float) -> None:
        self.members.refresh(now)
        for member in self.members:
            if member.health.needs_probe(now) and not member.probing:
                member.probing = True
                self._threads.submit(self._probe, member)
        self._start_waiting(now)
        self._copy_stragglers(now)

    def _probe(self, member: Member) -> None:
        alive = member.probe()
        with self._lock:
            member.probing = False
            member.health.probed(alive, time.monotonic())
            try:
                self.members.check_left(Away(f"{member.fault}; it did not come back"))
            except Away as error:
                self._fail_all(error)

    def _copy_stragglers(self, now: float) -> None:
        """Sends requests that take long to idle endpoints too, if nothing else waits for those; the oldest first."""
        typical_s = self._typical.seconds
        if self._copy_after is None or self._waiting or typical_s is None:
            return
        sent_before = now - self._copy_after * typical_s
        for attempt in sorted(self._in_flight, key=lambda attempt: attempt.sent):
            request = attempt.request
            if attempt.sent > sent_before or len(self._in_flight) >= MOST_IN_FLIGHT:
                return
            if attempt is not request.attempts[-1] or len(request.attempts) >= _COPIES or request.done:
                continue
            at = [other.member for other in request.attempts]
            if member := self.members.choose(now, rather_not=request.failed_at, never=at):
                self.counts["copied"] += 1
                self._start(request, member, now)
