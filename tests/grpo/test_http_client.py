"""Requests to a service that fails, is busy, is away, or is given up."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo import http_client
from grpo.http_client import Away, Http, Refused


class Service(ThreadingHTTPServer):
    """Answers each request with the next of `answers`: (status, headers, body)."""

    daemon_threads = True

    def __init__(self, answers):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.asked, self.freed = list(answers), [], threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((time.monotonic(), self.path, self.headers.get("Authorization"), body))
        status, headers, answer = self.server.answers.pop(0)
        if answer == "hang":
            self.server.freed.wait(30)
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def service() -> Iterator:
    running = []

    def start(*answers):
        server = Service(answers)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.freed.set()
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(http_client, "_FIRST_WAIT_S", 0.05)


def test_a_busy_and_then_a_failing_service_is_asked_again(service):
    server = service((429, {}, "busy"), (503, {}, "starting"), (200, {}, '{"x": 1}'))
    assert Http(server.url, 5, retries=2).post("/p", {"a": [1]}) == {"x": 1}
    assert [body for _, _, _, body in server.asked] == [b'{"a": [1]}'] * 3
    first, second, third = (at for at, _, _, _ in server.asked)
    # Half of 0.05 s at least, then half of 0.1 s.
    assert second - first >= 0.025
    assert third - second >= 0.05


def test_the_service_says_how_long_to_wait(service):
    server = service((429, {"Retry-After": "0.5"}, ""), (200, {}, "{}"))
    Http(server.url, 5, retries=1).post("/p")
    assert server.asked[1][0] - server.asked[0][0] >= 0.5


def test_a_refusal_is_not_repeated_and_says_why(service):
    server = service((400, {}, '{"error": {"message": "no\\nsuch model", "code": 400}}'))
    with pytest.raises(Refused, match="^status 400: no such model$"):
        Http(server.url, 5, retries=3).post("/p")
    assert len(server.asked) == 1


def test_retries_end_in_one_line(service):
    server = service(*[(500, {}, "out of\nmemory")] * 3)
    with pytest.raises(Away, match=rf"^{server.url}/p failed 3 times: status 500: out of memory$"):
        Http(server.url, 5, retries=2).post("/p")


def test_what_must_not_happen_twice_is_asked_once(service):
    server = service((500, {}, ""))
    with pytest.raises(Away):
        Http(server.url, 5, retries=5).post("/p", retries=0)
    assert len(server.asked) == 1


def test_nobody_there_ends_in_one_line(service):
    server = service()
    server.shutdown()
    server.server_close()
    with pytest.raises(Away, match=r"/p failed 2 times: .*refused$"):
        Http(server.url, 5, retries=1).post("/p")


def test_an_answer_that_does_not_come_is_not_waited_for(service):
    server = service((200, {}, "hang"), (200, {}, "{}"))
    began = time.monotonic()
    Http(server.url, 0.3, retries=1).post("/p")
    assert 0.3 < time.monotonic() - began < 3


def test_requests_in_other_threads_can_be_given_up(service):
    server = service((200, {}, "hang"))
    client, raised = Http(server.url, 30, retries=3), []

    def ask():
        try:
            client.post("/p")
        except Away as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not server.asked:
        time.sleep(0.01)
    client.abandon()
    thread.join(2)
    assert len(raised) == len(server.asked) == 1


def test_the_key_goes_along(service):
    server = service((200, {}, ""))
    assert Http(server.url, 5, 0, key="secret").post("/p") is None
    assert server.asked[0][2] == "Bearer secret"


def test_what_is_not_json_is_refused(service):
    server = service((200, {}, "<html>"))
    with pytest.raises(Refused, match="not JSON but '<html>'"):
        Http(server.url, 5, 0).post("/p")


def test_waiting_draws_no_random_number_of_the_process(service):
    server = service((500, {}, ""), (200, {}, ""))
    state = random.getstate()
    Http(server.url, 5, retries=1).post("/p")
    assert random.getstate() == state
