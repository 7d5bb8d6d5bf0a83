"""JSON over HTTP using only the standard library, for judges, endpoints and vLLM servers.

Requests may run in many threads at once, on connections that are kept open; `abandon` ends them all. A deadline covers
the whole request, so that a service that sends an occasional byte cannot block it. Retry delays grow and do not use the
global random generators, whose state a resumed run must find unchanged.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import random
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

from grpo.http.connections import Cancellation, Connections, Unreachable, proxy_for, read_within, seconds_left
from grpo.http.rate_limit import Pace
from grpo.secret_values import MASK, masked

_CONNECT_S, _FIRST_WAIT_S, _LONGEST_WAIT_S = 10.0, 0.5, 30.0
_jitter = random.SystemRandom()


class Refused(RuntimeError):
    """The service refused the request and would refuse it again. `status`: the HTTP status; the message is the
    service's. `url`: the endpoint of a fleet that refused; empty if there is only one."""

    url = ""

    def __init__(self, status: int, message: str):
        super().__init__(f"status {status}: {message}")
        self.status = status


class Away(ConnectionError):
    """The service was unreachable, overloaded or failing in every attempt.

    `kind` says how the last attempt failed: "unreachable", "timeout", "closed", "truncated", "not_http", or the status,
    such as "503". `wait_s`: seconds that the service asked to wait; None if it did not.
    """

    def __init__(self, message: str, kind: str = "closed", wait_s: float | None = None):
        super().__init__(message)
        self.kind, self.wait_s = kind, wait_s


class Http:
    """A client with retries, a limit on concurrent requests and a limit on their rate."""

    def __init__(
        self,
        url: str,
        timeout_s: float,
        retries: int,
        key: str | None = None,
        *,
        proxy: bool = False,
        pace: Pace | None = None,
        repeatable: bool | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        """`timeout_s`: maximum time for one attempt, from connecting to the last byte of the answer. `retries`: how
        often a request is retried if the connection fails or the status is 408, 429 or above 499. `proxy`: whether
        https uses the proxy named in the environment (HTTPS_PROXY, NO_PROXY). `pace`: a rate limit, which several
        clients may share; they then also pause together when the service asks one of them to. `repeatable`:
        whether requests may use a kept connection, on which they may have to be sent twice; by default those with
        retries. `tls`: the context for https, which several clients may share; None: its own."""
        parts = urlsplit(url)
        self._where = parts.netloc.rpartition("@")[2]  # a user name and password must not appear in messages
        self.url = f"{parts.scheme}://{self._where}"
        self.host = parts.hostname or ""
        self._key = key
        tls = (tls or tls_context()) if parts.scheme == "https" else None
        through = proxy_for(self.host) if proxy and tls is not None else None
        self._connections = Connections(self._where, tls, through)
        self._timeout_s, self._retries, self._pace = timeout_s, retries, pace or Pace()
        self._repeatable = repeatable
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def get(self, path: str, retries: int | None = None) -> Any:
        return self._ask("GET", path, None, retries, Cancellation())

    def post(
        self, path: str, body: Any = None, retries: int | None = None, cancellation: Cancellation | None = None
    ) -> Any:
        """Returns the JSON answer; None if it is empty. `retries` replaces the default: 0 for a request that must not
        be repeated. `cancellation` can end it from another thread. Raises Refused or Away."""
        return self._ask("POST", path, body, retries, cancellation or Cancellation())

    def abandon(self) -> None:
        """Aborts the requests of other threads, which then raise Away, by closing the connections. No further requests
        are possible."""
        self._connections.abandon()

    def _ask(self, method: str, path: str, body: Any, retries: int | None, cancellation: Cancellation) -> Any:
        data = None if body is None else json.dumps(body).encode()
        attempts = 1 + (self._retries if retries is None else retries)
        repeatable = attempts > 1 if self._repeatable is None else self._repeatable
        for attempt in range(attempts):
            wait: float | None = None
            self._pace.wait(self._connections.abandoned)
            try:
                status, headers, text = self._once(method, path, data, repeatable, cancellation)
            except (OSError, http.client.HTTPException) as error:
                fault, kind = str(error) or type(error).__name__, _kind(error)
            else:
                if status < 300:
                    return self._json(text)
                message = self._without_key(_message(text))
                fault, kind = f"status {status}: {message}", str(status)
                if status not in (408, 429) and status < 500:
                    raise Refused(status, message)
                if (wait := _retry_after(headers)) is not None:
                    self._pace.hold(wait)
            if self._connections.abandoned.is_set() or cancellation.cancelled:
                break
            if attempt + 1 < attempts:
                self._connections.abandoned.wait(
                    backoff(attempt, _FIRST_WAIT_S, _LONGEST_WAIT_S) if wait is None else wait
                )
        times = "" if attempts == 1 else f" {attempts} times"
        raise Away(f"{self.url}{path} failed{times}: {fault}", kind, wait)

    def _once(
        self, method: str, path: str, data: bytes | None, repeatable: bool, cancellation: Cancellation
    ) -> tuple[int, http.client.HTTPMessage, str]:
        """One attempt. A service may close an idle connection just as it is reused; a repeatable request is then sent
        once more."""
        deadline = time.monotonic() + self._timeout_s
        fresh = not repeatable
        while True:
            connection, kept = self._connections.take(min(_CONNECT_S, seconds_left(deadline)), fresh)
            sock, again = connection.sock, False
            try:
                cancellation.begin(sock)
                sock.settimeout(seconds_left(deadline))
                read_within(connection, deadline)
                try:
                    connection.request(method, path, data, self._headers)
                    response = connection.getresponse()
                except ConnectionError:
                    if not kept or self._connections.abandoned.is_set() or cancellation.cancelled:
                        raise
                    fresh = True
                    continue
                text = response.read().decode(errors="replace")
                again = not response.will_close
                return response.status, response.headers, text
            finally:
                again = cancellation.end() and again
                self._connections.give_back(connection, sock, again)

    def _json(self, text: str) -> Any:
        try:
            return json.loads(text) if text else None
        except (ValueError, RecursionError):
            raise Refused(200, self._without_key(f"not JSON but {text[:80]!r}")) from None

    def _without_key(self, message: str) -> str:
        """A service's message without the key: some services repeat the key that they reject."""
        return masked(message.replace(self._key, MASK) if self._key else message)


def tls_context() -> ssl.SSLContext:
    """A TLS context for many connections: reading the system's certificates takes longer than a request."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _kind(error: Exception) -> str:
    return next((name for name, types in _KINDS.items() if isinstance(error, types)), "closed")


_KINDS: dict[str, type[Exception] | tuple[type[Exception], ...]] = {
    "unreachable": Unreachable,
    "timeout": TimeoutError,
    "closed": OSError,  # includes http.client's RemoteDisconnected
    "truncated": http.client.IncompleteRead,
    "not_http": http.client.HTTPException,
}
"""Checked in this order; the first match is used."""


def backoff(attempt: int, first_s: float, longest_s: float) -> float:
    """Seconds to wait before a retry: doubles each time, with random jitter of half, so that clients do not retry
    together."""
    longest = min(longest_s, first_s * 2 ** min(attempt, 60))
    return _jitter.uniform(longest / 2, longest)


def _retry_after(headers: http.client.HTTPMessage) -> float | None:
    """The Retry-After header in seconds, from a number or a date; None if it is malformed."""
    wish = headers["Retry-After"]
    with contextlib.suppress(TypeError, ValueError):
        seconds = (
            float(wish) if wish[:1].isdigit() else email.utils.parsedate_to_datetime(wish).timestamp() - time.time()
        )
        return min(_LONGEST_WAIT_S, max(0.0, seconds))
    return None


def _message(text: str) -> str:
    """The service's error message on one line: from {"error": {"message"}}, as most services answer, or the body."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    return " ".join(text.split())[:300]
