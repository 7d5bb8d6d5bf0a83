"""Connections that are kept open: used again, and given up when the service gave them up."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grpo.http import client, connections
from grpo.http.client import Away, Http

Behave = Callable[["Service", socket.socket, int, int], bool]


class Service:
    """Counts connections and requests. `behave(service, socket, connection, request)`, both counted from 0, answers a
    request of a connection, and returns whether to read the next one."""

    def __init__(self, behave: Behave):
        self.behave, self.connections, self.requests, self.ended = behave, 0, 0, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(sock, self.connections - 1), daemon=True).start()

    def _serve(self, sock: socket.socket, connection: int) -> None:
        with sock, contextlib.suppress(OSError):
            for number in range(100):
                if not read_request(sock):
                    break
                self.requests += 1
                if not self.behave(self, sock, connection, number):
                    break
        self.ended += 1


def read_request(sock: socket.socket) -> bool:
    got = b""
    while b"\r\n\r\n" not in got:
        if not (more := sock.recv(65536)):
            return False
        got += more
    head, _, body = got.partition(b"\r\n\r\n")
    length = next((int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length")), 0)
    while len(body) < length:
        body += sock.recv(65536)
    return True


def say(sock: socket.socket, text: str = '{"x": 1}', head: str = "") -> bool:
    sock.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n{head}\r\n{text}".encode())
    return True


def always(service: Service, sock: socket.socket, connection: int, number: int) -> bool:
    return say(sock)


@pytest.fixture
def service() -> Iterator[Callable[[Behave], Service]]:
    running: list[Service] = []

    def start(behave: Behave) -> Service:
        running.append(Service(behave))
        return running[-1]

    yield start
    for one in running:
        one.listener.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_requests_share_a_connection_until_they_are_abandoned(service: Any) -> None:
    server = service(always)
    http = Http(server.url, 5, retries=1)
    assert [http.post("/p", {"a": n}) for n in range(5)] == [{"x": 1}] * 5
    assert (server.connections, server.requests, server.ended) == (1, 5, 0)
    http.abandon()
    until(lambda: server.ended == 1)
    with pytest.raises(Away):
        http.post("/p")
    assert server.connections == 1


def test_each_thread_has_its_own_and_no_more_are_open_than_at_once(service: Any) -> None:
    together = threading.Barrier(4, timeout=10)

    def behave(server: Service, sock: socket.socket, connection: int, number: int) -> bool:
        together.wait()
        return say(sock)

    server = service(behave)
    http = Http(server.url, 10, retries=1)
    for _ in range(3):
        threads = [threading.Thread(target=http.post, args=("/p",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (server.connections, server.requests) == (4, 12)
    http.abandon()


@pytest.mark.parametrize("head", ["Connection: close\r\n", ""], ids=["said", "silent"])
def test_a_connection_that_the_service_closed_is_not_used_again(service: Any, head: str) -> None:
    server = service(lambda server, sock, connection, number: say(sock, head=head) and False)
    http = Http(server.url, 5, retries=1)
    for number in range(3):
        assert http.post("/p") == {"x": 1}
        until(lambda number=number: server.ended == number + 1)
    assert (server.connections, server.requests) == (3, 3)


def test_one_that_is_closed_as_it_is_used_again_costs_no_attempt(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FIRST_WAIT_S", 60.0)  # an attempt that failed would wait so long
    server = service(lambda server, sock, connection, number: number == 0 and say(sock))
    http = Http(server.url, 5, retries=1)
    assert [http.post("/p") for _ in range(3)] == [{"x": 1}] * 3
    assert (server.connections, server.requests) == (3, 5)


def test_what_must_not_be_repeated_gets_a_connection_of_its_own(service: Any) -> None:
    server = service(lambda server, sock, connection, number: number == 0 and say(sock))
    http = Http(server.url, 5, retries=1)
    assert [http.post("/p"), http.post("/p", retries=0)] == [{"x": 1}] * 2
    assert (server.connections, server.requests) == (2, 2)


def test_a_connection_that_rested_too_long_is_closed(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_IDLE_S", 0.05)
    server = service(always)
    http = Http(server.url, 5, retries=1)
    http.post("/p")
    time.sleep(0.1)
    http.post("/p")
    until(lambda: server.ended == 1)
    assert server.connections == 2


def test_what_nobody_asked_for_is_no_answer_to_the_next_request(service: Any) -> None:
    answered, forged = threading.Event(), threading.Event()

    def behave(server: Service, sock: socket.socket, connection: int, number: int) -> bool:
        say(sock)
        if connection == 0 and answered.wait(60):  # else the client may read both at once, and drop the second
            say(sock, '{"x": "forged"}')
            forged.set()
        return True

    server = service(behave)
    http = Http(server.url, 5, retries=1)
    assert http.post("/p") == {"x": 1}
    answered.set()
    assert forged.wait(60)
    time.sleep(0.05)  # it arrives
    assert http.post("/p") == {"x": 1}


def test_the_deadline_holds_on_a_connection_that_is_used_again(service: Any) -> None:
    def behave(server: Service, sock: socket.socket, connection: int, number: int) -> bool:
        if connection == number == 0:
            return say(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while True:
            sock.sendall(b" ")
            time.sleep(0.05)

    server = service(behave)
    http = Http(server.url, 0.4, retries=1)
    http.post("/p")
    began = time.monotonic()
    with pytest.raises(Away) as raised:
        http.post("/p")
    assert raised.value.kind == "timeout" and time.monotonic() - began < 5
    assert (server.connections, server.requests) == (2, 3)
