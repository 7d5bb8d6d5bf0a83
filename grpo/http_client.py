"""JSON over HTTP with nothing but Python's own library: for a trainer that asks a service beside it.

Requests may run in many threads at once; `abandon` ends them all. Repeats wait longer each time, and never draw from
the process's random numbers, which a resumed run must find as they were.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

_CONNECT_S, _FIRST_WAIT_S, _LONGEST_WAIT_S = 10.0, 0.5, 30.0
_jitter = random.SystemRandom()


class Refused(RuntimeError):
    """The service answered, and will answer so again. `status` is HTTP's, the message the service's own."""

    def __init__(self, status: int, message: str):
        super().__init__(f"status {status}: {message}")
        self.status = status


class Away(ConnectionError):
    """The service is not there, or was overloaded or failing at each attempt."""


class Http:
    def __init__(self, url: str, timeout_s: float, retries: int, key: str | None = None):
        """`timeout_s`: longest wait for an answer. `retries`: how often a request is repeated when the connection
        fails or the status is 408, 429 or above 499."""
        parts = urlsplit(url)
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.host = parts.hostname or ""
        self._connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._where = parts.netloc
        self._timeout_s, self._retries = timeout_s, retries
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._abandoned = threading.Event()

    def get(self, path: str, retries: int | None = None) -> Any:
        return self._ask("GET", path, None, retries)

    def post(self, path: str, body: Any = None, retries: int | None = None) -> Any:
        """The answer, read as JSON; None if it is empty. `retries` replaces the usual number: 0 for a request that
        must not happen twice. Raises Refused or Away."""
        return self._ask("POST", path, body, retries)

    def abandon(self) -> None:
        """Breaks off what runs in other threads, which then raise Away; the service sees its connections closed.
        Nothing more can be asked."""
        with self._lock:
            self._abandoned.set()
            for connection in self._open:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):  # it ended by itself
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def _ask(self, method: str, path: str, body: Any, retries: int | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        attempts = 1 + (self._retries if retries is None else retries)
        for attempt in range(attempts):
            wait: float | None = None
            try:
                status, headers, text = self._once(method, path, data)
            except (OSError, http.client.HTTPException) as error:
                fault = str(error) or type(error).__name__
            else:
                if status < 300:
                    return self._json(text)
                fault = f"status {status}: {_message(text)}"
                if status not in (408, 429) and status < 500:
                    raise Refused(status, _message(text))
                wait = _retry_after(headers)
            if self._abandoned.is_set():
                break
            if attempt + 1 < attempts:
                self._abandoned.wait(_backoff(attempt) if wait is None else wait)
        times = "" if attempts == 1 else f" {attempts} times"
        raise Away(f"{self.url}{path} failed{times}: {fault}")

    def _once(self, method: str, path: str, data: bytes | None) -> tuple[int, http.client.HTTPMessage, str]:
        connection = self._connection(self._where, timeout=_CONNECT_S)
        try:
            connection.connect()
            assert connection.sock is not None
            connection.sock.settimeout(self._timeout_s)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that is gone is noticed
            with self._lock:
                self._open.add(connection)
                if self._abandoned.is_set():
                    raise ConnectionAbortedError("abandoned")
            connection.request(method, path, data, self._headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read().decode(errors="replace")
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _json(self, text: str) -> Any:
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise Refused(200, f"not JSON but {text[:80]!r}") from None


def _backoff(attempt: int) -> float:
    """Seconds: twice as long each time, and half of it by chance, so that clients do not come back together."""
    longest = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**attempt)
    return _jitter.uniform(longest / 2, longest)


def _retry_after(headers: http.client.HTTPMessage) -> float | None:
    with contextlib.suppress(TypeError, ValueError):
        return min(_LONGEST_WAIT_S, max(0.0, float(headers["Retry-After"])))
    return None


def _message(text: str) -> str:
    """What a service says of its failure, on one line: vLLM's and most others' answer is {"error": {"message"}}."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    return " ".join(text.split())[:300]
