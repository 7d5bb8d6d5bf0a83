"""Requests to a service that fails, is busy, is away, or is given up."""

from __future__ import annotations

import contextlib
import email.utils
import random
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo.http import client as http_client
from grpo.http.client import Away, Http, Refused
from grpo.http.rate_limit import Pace


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
        if answer == "close":
            return
        if answer == "nonsense":
            self.wfile.write(b"SSH-2.0\r\n")
            return
        self.send_response(status)
        if answer == "drip of headers":
            self.drip(b"X-Long: ")
            return
        for name, value in {"Content-Length": str(len(answer)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if answer == "hang after headers":
            self.wfile.flush()
            self.server.freed.wait(30)
        elif answer == "drip of a body":
            self.drip(b"")
        else:
            self.wfile.write(answer.encode())

    def drip(self, first):
        self.flush_headers()
        self.wfile.write(first)
        with contextlib.suppress(OSError):
            while not self.server.freed.wait(0.05):
                self.wfile.write(b" ")

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
    server = service((200, {}, "hang"), *[(200, {}, "{}")] * 5)
    began = time.monotonic()
    Http(server.url, 0.3, retries=5).post("/p")
    assert 0.3 < time.monotonic() - began < 20


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
    thread.join(20)  # 10 s less than the timeout
    assert len(raised) == len(server.asked) == 1


def test_requests_whose_answer_has_begun_can_be_given_up_too(service):
    server = service((200, {"Connection": "close"}, "hang after headers"))
    client, raised = Http(server.url, 30, retries=0), []

    def ask():
        try:
            client.post("/p")
        except Away as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not server.asked:
        time.sleep(0.01)
    time.sleep(0.2)  # the headers arrive
    began = time.monotonic()
    client.abandon()
    thread.join(20)
    assert len(raised) == 1 and time.monotonic() - began < 20


@pytest.mark.parametrize("answer", ["drip of a body", "drip of headers"])
def test_a_byte_now_and_then_does_not_move_the_deadline(service, answer):
    server = service((200, {}, answer))
    began = time.monotonic()
    with pytest.raises(Away) as raised:
        Http(server.url, 0.4, retries=0).post("/p")
    assert raised.value.kind == "timeout"
    assert 0.4 <= time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("answer", "kind", "wait_s"),
    [
        ((503, {}, ""), "503", None),
        ((429, {"Retry-After": "7"}, ""), "429", 7.0),
        ((429, {"Retry-After": "7000"}, ""), "429", 30.0),
        ((429, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, ""), "429", 0.0),  # it is over
        ((429, {"Retry-After": "soon"}, ""), "429", None),
        ((429, {"Retry-After": "nan"}, ""), "429", None),
        ((200, {"Content-Length": "9"}, "{}"), "truncated", None),
        ((200, {}, "close"), "closed", None),
        ((200, {}, "nonsense"), "not_http", None),
    ],
)
def test_how_a_service_failed(service, answer, kind, wait_s):
    server = service(answer)
    with pytest.raises(Away) as raised:
        Http(server.url, 5, retries=0).post("/p")
    assert (raised.value.kind, raised.value.wait_s) == (kind, wait_s)


def test_how_long_to_wait_may_be_a_date(service):
    date = email.utils.formatdate(time.time() + 20, usegmt=True)
    server = service((503, {"Retry-After": date}, ""))
    with pytest.raises(Away) as raised:
        Http(server.url, 5, retries=0).post("/p")
    assert 15 < raised.value.wait_s <= 20


def test_nobody_there_is_unreachable(service):
    server = service()
    server.shutdown()
    server.server_close()
    with pytest.raises(Away) as raised:
        Http(server.url, 1, retries=0).post("/p")
    assert raised.value.kind == "unreachable"


def test_a_pace_spreads_the_requests_of_all_clients(service):
    server = service(*[(200, {}, "{}")] * 6)
    pace = Pace(600)  # one in 0.1 s
    clients = [Http(server.url, 5, 0, pace=pace) for _ in range(2)]
    threads = [threading.Thread(target=client.post, args=("/p",)) for client in clients * 3]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times = sorted(at for at, *_ in server.asked)
    assert times[-1] - began >= 0.49  # the first may arrive late


def test_clients_that_share_a_pace_rest_together(service):
    server = service((429, {"Retry-After": "0.5"}, ""), (200, {}, "{}"))
    pace = Pace()
    with pytest.raises(Away):
        Http(server.url, 5, 0, pace=pace).post("/p")
    Http(server.url, 5, 0, pace=pace).post("/p")
    assert server.asked[1][0] - server.asked[0][0] >= 0.45


def certificate(folder):
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem"
    command += " -addext subjectAltName=DNS:localhost"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


class Tunnel(BaseHTTPRequestHandler):
    """A proxy that connects two sockets, for whoever has its password."""

    def do_CONNECT(self):
        self.server.asked.append((self.path, self.headers.get("Proxy-Authorization")))
        host, port = self.path.split(":")
        with socket.create_connection((host, int(port))) as other:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=self.copy, args=(other, self.connection), daemon=True)
            back.start()
            self.copy(self.connection, other)
            back.join(5)

    def copy(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def log_message(self, *_):
        pass


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls_and_the_environments_proxy(service, tmp_path, monkeypatch):
    server = service((200, {}, '{"x": 1}'), (200, {}, '{"x": 2}'), (200, {}, '{"x": 3}'))
    cert, key = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = f"https://localhost:{server.server_address[1]}"
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Tunnel)
    proxy.asked = []
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:p%40ss@127.0.0.1:{proxy.server_port}")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(Away, match="certificate") as raised:
        Http(url, 5, 0).post("/p")
    assert raised.value.kind == "unreachable"
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    assert Http(url, 5, 0).post("/p") == {"x": 1} and not proxy.asked
    assert Http(url, 5, 0, proxy=True).post("/p") == {"x": 2}
    assert proxy.asked == [(url.removeprefix("https://"), "Basic bWU6cEBzcw==")]  # me:p@ss
    monkeypatch.setenv("no_proxy", "localhost")
    assert Http(url, 5, 0, proxy=True).post("/p") == {"x": 3} and len(proxy.asked) == 1
    proxy.shutdown()
    proxy.server_close()


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
