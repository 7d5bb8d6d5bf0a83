"""A TCP proxy on loopback that can refuse, swallow or cut connections, and counts what that disturbs."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from dataclasses import dataclass


@dataclass(eq=False)
class Link:
    """A client's connection and the one to the server behind it. `waits`: the client sent the last bytes."""

    client: socket.socket
    beyond: socket.socket | None = None
    waits: bool = False

    def reset(self) -> None:
        """Both connections, at once."""
        for end in (self.client, self.beyond):
            if end is not None:
                _reset(end)


class Proxy:
    """Passes connections on, by `mode`: pass, refuse (reset at once), swallow (accepted, never answered) or away
    (passed on to a server that does not answer now). `disturbed` counts connections that were refused, swallowed, or
    cut while the client waited, and what clients sent to a server that was away.
    """

    def __init__(self, target: int):
        self.target, self.mode, self.disturbed = target, "pass", 0
        self._loss: tuple[random.Random, float] | None = None
        self._open: set[Link] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def lossy(self, chance: random.Random, share: float) -> None:
        """Cut this share of new connections after their first bytes."""
        self._loss = (chance, share)

    def cut(self) -> None:
        """Reset all open connections."""
        with self._lock:
            links, self._open = self._open, set()
        for link in links:
            self._count(link.waits)
            link.reset()

    def heal(self) -> None:
        """Pass everything again."""
        self.mode, self._loss = "pass", None

    def close(self) -> None:
        """Stop listening, and cut what is open."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _count(self, disturbed: bool = True) -> None:
        with self._lock:
            self.disturbed += disturbed

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            link = Link(connection)
            if self.mode == "refuse":
                self._count()
                link.reset()
                continue
            with self._lock:
                self._open.add(link)
            if self.mode == "swallow":
                self._count()
                continue
            try:
                link.beyond = socket.create_connection(("127.0.0.1", self.target), timeout=10)
                link.beyond.settimeout(None)
            except OSError:
                self._count()
                link.reset()
                continue
            doomed = self._loss is not None and self._loss[0].random() < self._loss[1]
            threading.Thread(target=self._ask, args=(link,), daemon=True).start()
            threading.Thread(target=self._answer, args=(link, doomed), daemon=True).start()

    def _ask(self, link: Link) -> None:
        """Copy what the client sends until it ends."""
        assert link.beyond is not None
        with contextlib.suppress(OSError):
            while data := link.client.recv(65536):
                link.waits = True
                self._count(self.mode == "away")
                link.beyond.sendall(data)
        _shut(link)

    def _answer(self, link: Link, doomed: bool) -> None:
        """Copy what the server sends until it ends; a doomed connection ends with the first bytes."""
        assert link.beyond is not None
        with contextlib.suppress(OSError):
            while data := link.beyond.recv(65536):
                if doomed:
                    self._count()
                    link.reset()
                    break
                link.waits = False
                link.client.sendall(data)
        self._count(self.mode == "away" and link.waits)
        with self._lock:
            self._open.discard(link)
        _shut(link)


def _shut(link: Link) -> None:
    for end in (link.client, link.beyond):
        if end is not None:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
