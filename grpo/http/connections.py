"""Connections to one service, kept open between requests; each request has its own deadline."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import io
import select
import socket
import ssl
import threading
import time
import urllib.request
from typing import Any
from urllib.parse import unquote, urlsplit

_IDLE_S = 20.0
"""A connection that was idle for longer is replaced by a new one: a device on the way may have silently dropped it."""


class Unreachable(OSError):
    """No connection was made."""


class Cancellation:
    """Ends one request from another thread, by shutting down its connection: most services then stop working on it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """The request raises ConnectionError, or has its answer already. One that is still connecting ends after
        that."""
        with self._lock:
            self.cancelled = True
            if self._sock is not None:
                with contextlib.suppress(OSError):  # it has ended already
                    self._sock.shutdown(socket.SHUT_RDWR)

    def begin(self, sock: socket.socket) -> None:
        """Raises ConnectionAbortedError if it was cancelled before."""
        with self._lock:
            if self.cancelled:
                raise ConnectionAbortedError("cancelled")
            self._sock = sock

    def end(self) -> bool:
        """Returns whether the connection can serve another request."""
        with self._lock:
            self._sock = None
            return not self.cancelled


class Connections:
    """Connections to one host for many threads; each connection is used by one thread at a time."""

    def __init__(self, where: str, tls: ssl.SSLContext | None, proxy: tuple[str, dict[str, str]] | None):
        """`where`: host and port. `proxy`: (host:port, headers) of the proxy to tunnel through."""
        self._where, self._tls, self._proxy = where, tls, proxy
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.abandoned = threading.Event()

    def take(self, connect_s: float, fresh: bool) -> tuple[http.client.HTTPConnection, bool]:
        """Returns an open connection, and whether it has served a request before; with `fresh`, always a new one.
        Return it with `give_back`. Raises Unreachable, or ConnectionAbortedError after `abandon`."""
        while not fresh and (kept := self._kept()):
            if not _has_ended(kept.sock):
                return kept, True
            self.give_back(kept, kept.sock, False)
        if self.abandoned.is_set():
            raise ConnectionAbortedError("abandoned")
        connection = self._new(connect_s)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise Unreachable(str(error) or type(error).__name__) from None
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a host that is gone
        with self._lock:
            if not self.abandoned.is_set():  # `abandon` may have been called while this one was connecting
                self._open.add(connection.sock)
                return connection, False
        connection.close()
        raise ConnectionAbortedError("abandoned")

    def give_back(self, connection: http.client.HTTPConnection, sock: socket.socket, again: bool) -> None:
        """Returns a connection whose socket was `sock`; `again`: whether it can serve another request."""
        with self._lock:
            if again and not self.abandoned.is_set():
                self._idle.append((connection, time.monotonic()))
                return
            self._open.discard(sock)
        connection.close()

    def abandon(self) -> None:
        """Closes all connections, including those in use by other threads, and prevents new ones."""
        with self._lock:
            self.abandoned.set()
            for sock in self._open:
                with contextlib.suppress(OSError):  # it has ended already
                    sock.shutdown(socket.SHUT_RDWR)
            idle, self._idle = self._idle, []
            self._open.difference_update(connection.sock for connection, _ in idle)
        for connection, _ in idle:
            connection.close()

    def _kept(self) -> http.client.HTTPConnection | None:
        """The most recently used idle connection, so that surplus connections expire."""
        with self._lock:
            old = [c for c, since in self._idle if since < time.monotonic() - _IDLE_S]
            self._idle = [(c, since) for c, since in self._idle if c not in old]
            self._open.difference_update(connection.sock for connection in old)
            kept = self._idle.pop()[0] if self._idle else None
        for connection in old:
            connection.close()
        return kept

    def _new(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._where, timeout=timeout_s)
        if self._proxy is None:
            return http.client.HTTPSConnection(self._where, timeout=timeout_s, context=self._tls)
        where, headers = self._proxy
        connection = http.client.HTTPSConnection(where, timeout=timeout_s, context=self._tls)
        connection.set_tunnel(self._where, headers=headers)
        return connection


def _has_ended(sock: socket.socket) -> bool:
    """Whether the service closed an idle connection, or sent unsolicited data on it."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))


def read_within(connection: http.client.HTTPConnection, deadline: float) -> None:
    """Makes the connection read its next response by `deadline` (time.monotonic) or raise TimeoutError."""
    connection.response_class = functools.partial(_response, deadline=deadline)  # type: ignore[assignment]


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
        self._sock.settimeout(seconds_left(self._deadline))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


def seconds_left(deadline: float) -> float:
    """Seconds until `deadline`. Raises TimeoutError if it has passed."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left


def proxy_for(host: str) -> tuple[str, dict[str, str]] | None:
    """(host:port, headers) of the https proxy that the environment names; None if there is none."""
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
