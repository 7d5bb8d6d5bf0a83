"""A TCP proxy on loopback that can refuse, swallow or cut connections."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading


class Proxy:
    """Passes connections on, by `mode`: pass, refuse (reset at once) or swallow (accepted, never answered)."""

    def __init__(self, target: int):
        self.target, self.mode = target, "pass"
        self._loss: tuple[random.Random, float] | None = None
        self._open: set[socket.socket] = set()
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
            connections, self._open = self._open, set()
        for connection in connections:
            _reset(connection)

    def heal(self) -> None:
        """Pass everything again."""
        self.mode, self._loss = "pass", None

    def close(self) -> None:
        """Stop listening, and cut what is open."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if self.mode == "refuse":
                _reset(connection)
                continue
            self._keep(connection)
            if self.mode == "swallow":
                continue
            try:
                beyond = socket.create_connection(("127.0.0.1", self.target), timeout=10)
                beyond.settimeout(None)
            except OSError:
                _reset(connection)
                continue
            self._keep(beyond)
            doomed = self._loss is not None and self._loss[0].random() < self._loss[1]
            threading.Thread(target=_pump, args=(connection, beyond, False), daemon=True).start()
            threading.Thread(target=_pump, args=(beyond, connection, doomed), daemon=True).start()

    def _keep(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.add(connection)


def _pump(source: socket.socket, target: socket.socket, doomed: bool) -> None:
    """Copy bytes until one side ends; a doomed connection ends with the first ones."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if doomed:
                break
            target.sendall(data)
    for end in (source, target):
        if doomed:
            _reset(end)
        else:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
