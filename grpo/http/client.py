"""JSON over HTTP with the standard library alone, for judges, endpoints and vLLM servers.

Requests may run in many threads at once; `abandon` ends them all. A deadline covers the whole request, so a service
that sends a byte now and then cannot hold it. Retries wait longer each time, and do not draw from the global random
generators, whose state a resumed run must find unchanged.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import functools
import http.client
import io
import json
import random
import socket
import ssl
import threading
import time
import urllib.request
from typing import Any
from urllib.parse import unquote, urlsplit

from grpo.http.rate_limit import Pace
from grpo.secret_values import MASK, masked

_CONNECT_S, _FIRST_WAIT_S, _LONGEST_WAIT_S = 10.0, 0.5, 30.0
_jitter = random.SystemRandom()


class Refused(RuntimeError):
    """The service refused the request and would refuse it again. `status` is HTTP's, the message the service's."""

    def __init__(self, status: int, message: str):
        super().__init__(f"status {status}: {message}")
        self.status = status


class Away(ConnectionError):
    """The service was unreachable, overloaded or failing at each attempt.

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
    ):
        """`timeout_s`: longest time for one attempt, from its connection to the answer's last byte. `retries`: how
        often a request is repeated when the connection fails or the status is 408, 429 or above 499. `proxy`: whether
        https goes through the proxy that the environment names (HTTPS_PROXY, NO_PROXY). `pace`: a rate limit, which
        several clients may share; they then also rest together when the service asks one of them to."""
        parts = urlsplit(url)
        self._where = parts.netloc.rpartition("@")[2]  # a user name and password would reach every message
        self.url = f"{parts.scheme}://{self._where}"
        self.host = parts.hostname or ""
        self._key = key
        # One TLS context for all connections: reading the system's certificates takes longer than a request.
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        if self._tls is not None:
            self._tls.set_alpn_protocols(["http/1.1"])
        self._proxy = _proxy_for(self.host) if proxy and self._tls is not None else None
        self._timeout_s, self._retries, self._pace = timeout_s, retries, pace or Pace()
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._abandoned = threading.Event()

    def get(self, path: str, retries: int | None = None) -> Any:
        return self._ask("GET", path, None, retries)

    def post(self, path: str, body: Any = None, retries: int | None = None) -> Any:
        """The JSON answer; None if it is empty. `retries` replaces the default: 0 for a request that must not be
        repeated. Raises Refused or Away."""
        return self._ask("POST", path, body, retries)

    def abandon(self) -> None:
        """Aborts the requests of other threads, which then raise Away; the service sees its connections closed. No
        further requests are possible."""
        with self._lock:
            self._abandoned.set()
            for sock in self._open:
                with contextlib.suppress(OSError):  # it has ended already
                    sock.shutdown(socket.SHUT_RDWR)

    def _ask(self, method: str, path: str, body: Any, retries: int | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        attempts = 1 + (self._retries if retries is None else retries)
        for attempt in range(attempts):
            wait: float | None = None
            self._pace.wait(self._abandoned)
            try:
                status, headers, text = self._once(method, path, data)
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
            if self._abandoned.is_set():
                break
            if attempt + 1 < attempts:
                self._abandoned.wait(backoff(attempt, _FIRST_WAIT_S, _LONGEST_WAIT_S) if wait is None else wait)
        times = "" if attempts == 1 else f" {attempts} times"
        raise Away(f"{self.url}{path} failed{times}: {fault}", kind, wait)

    def _once(self, method: str, path: str, data: bytes | None) -> tuple[int, http.client.HTTPMessage, str]:
        deadline = time.monotonic() + self._timeout_s
        connection = self._connection()
        sock: socket.socket | None = None
        try:
            sock = _connect(connection)
            sock.settimeout(_left(deadline))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a host that is gone
            with self._lock:
                self._open.add(sock)
                if self._abandoned.is_set():
                    raise ConnectionAbortedError("abandoned")
            connection.response_class = functools.partial(_response, deadline=deadline)  # type: ignore[assignment]
            connection.request(method, path, data, self._headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read().decode(errors="replace")
        finally:
            if sock is not None:
                with self._lock:
                    self._open.discard(sock)
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        timeout = min(_CONNECT_S, self._timeout_s)
        if self._tls is None:
            return http.client.HTTPConnection(self._where, timeout=timeout)
        if self._proxy is None:
            return http.client.HTTPSConnection(self._where, timeout=timeout, context=self._tls)
        where, headers = self._proxy
        connection = http.client.HTTPSConnection(where, timeout=timeout, context=self._tls)
        connection.set_tunnel(self._where, headers=headers)
        return connection

    def _json(self, text: str) -> Any:
        try:
            return json.loads(text) if text else None
        except (ValueError, RecursionError):
            raise Refused(200, self._without_key(f"not JSON but {text[:80]!r}")) from None

    def _without_key(self, message: str) -> str:
        """A service's own words, some of which repeat the key that they refuse."""
        return masked(message.replace(self._key, MASK) if self._key else message)


def _response(sock: socket.socket, *arguments: Any, deadline: float, **named: Any) -> http.client.HTTPResponse:
    return http.client.HTTPResponse(_Within(sock, deadline), *arguments, **named)  # type: ignore[arg-type]


class _Within:
    """A socket's reader with a deadline for the whole response; a socket's own timeout restarts with every byte."""

    def __init__(self, sock: socket.socket, deadline: float):
        self._sock, self._deadline = sock, deadline

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self._sock, self._deadline))


class _Reader(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline: float):
        # Python's socket file keeps the socket open when the connection is closed before the response has been read.
        self._sock, self._deadline, self._file = sock, deadline, sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._deadline))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Unreachable(OSError):
    """No connection was made."""


def _connect(connection: http.client.HTTPConnection) -> socket.socket:
    try:
        connection.connect()
    except OSError as error:
        raise _Unreachable(str(error) or type(error).__name__) from None
    assert connection.sock is not None
    return connection.sock


def _left(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left


def _kind(error: Exception) -> str:
    return next((name for name, types in _KINDS.items() if isinstance(error, types)), "closed")


_KINDS: dict[str, type[Exception] | tuple[type[Exception], ...]] = {
    "unreachable": _Unreachable,
    "timeout": TimeoutError,
    "closed": OSError,  # includes http.client's RemoteDisconnected
    "truncated": http.client.IncompleteRead,
    "not_http": http.client.HTTPException,
}
"""Checked in this order; the first match counts."""


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


def _proxy_for(host: str) -> tuple[str, dict[str, str]] | None:
    """(host:port, headers) of the proxy for https that the environment names."""
    proxy = urllib.request.getproxies().get("https")
    if not proxy or urllib.request.proxy_bypass(host):
        return None
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    where = f"{parts.hostname}:{parts.port or 80}"
    if parts.username is None:
        return where, {}
    name = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    authorization = f"Basic {base64.b64encode(name.encode()).decode()}"
    return where, {"Proxy-Authorization": authorization}


def _message(text: str) -> str:
    """The service's error message on one line: from {"error": {"message"}}, as most services answer, or the body."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    return " ".join(text.split())[:300]
