"""A real OpenAI-compatible chat endpoint, on a real socket, that can fail in every way there is."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Act = Callable[["Handler"], None]


class FaultyEndpoint(ThreadingHTTPServer):
    """`plan(number, body)` names what the number-th request gets: a key of FAULTS, or the content of a reply.

    `served` counts the faults by name and the replies as "reply"; `bodies` and `keys` are what was asked."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, plan: Callable[[int, dict[str, Any]], str | None]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan = plan
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.served: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.freed = threading.Event()
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/"

    def close(self) -> None:
        self.freed.set()
        self.shutdown()
        self.server_close()
        self.thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: tests close connections on purpose."""


class Handler(BaseHTTPRequestHandler):
    server: FaultyEndpoint

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        with server.lock:
            number = len(server.bodies)
            server.bodies.append(body)
            server.keys.append(self.headers.get("Authorization"))
            server.times.append(time.monotonic())
            act = server.plan(number, body)
            server.served[act if act in FAULTS else "reply"] += 1
            self.counted = True
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        try:
            if act in FAULTS:
                FAULTS[act](self)
            else:
                self.reply(act)
        finally:
            self.leave()

    def leave(self) -> None:
        """Counts the request as done: before the client can have read all of the reply, and may send another."""
        with self.server.lock:
            self.server.at_once -= self.counted
            self.counted = False

    def reply(self, content: str | None, finish_reason: str = "stop") -> None:
        message = {"role": "assistant", "content": content}
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        self.send(200, json.dumps({"choices": [{"message": message, "finish_reason": finish_reason}], "usage": usage}))

    def send(self, status: int, text: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(text.encode())), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.leave()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


def status(number: int, **headers: str) -> Act:
    return lambda handler: handler.send(number, "out of\norder", **headers)


def body(text: str, **headers: str) -> Act:
    return lambda handler: handler.send(200, text, **headers)


def hang(handler: Handler) -> None:
    handler.server.freed.wait(60)


def drip(head: bytes) -> Act:
    """A byte every 20 ms, for as long as anyone listens."""

    def act(handler: Handler) -> None:
        handler.wfile.write(head)
        while not handler.server.freed.wait(0.02):
            handler.wfile.write(b" ")

    return act


def reset(handler: Handler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


FAULTS: dict[str | None, Act] = {
    "400": status(400),
    "401": status(401),
    "401 with the key": lambda handler: handler.send(
        401, json.dumps({"error": {"message": f"no such key: {handler.headers['Authorization']}"}})
    ),
    "403": status(403),
    "404": status(404),
    "408": status(408),
    "429": status(429),
    "429 wait": status(429, Retry_After="0.2"),
    "500": status(500),
    "503": status(503),
    "hang": hang,
    "drip": drip(b"HTTP/1.0 200 OK\r\nContent-Length: 100000\r\n\r\n"),
    "drip of headers": drip(b"HTTP/1.0 200 OK\r\nX-Long: "),
    "truncated": body('{"choices": [', Content_Length="1000"),
    "truncated json": body('{"choices": [{"mess'),
    "html": body("<html>log in</html>"),
    "deep json": body("[" * 100_000),
    "closed": lambda handler: None,
    "reset": reset,
    "not http": lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n") and None,
    "no choices": body('{"choices": []}'),
    "error in 200": body('{"error": {"message": "overloaded"}}'),
    "list": body("[]"),
    "cut reply": lambda handler: handler.reply('{"analysis": "It is', "length"),
}

KINDS = {
    "400": "refused",
    "408": "408",
    "429": "429",
    "429 wait": "429",
    "500": "500",
    "503": "503",
    "hang": "timeout",
    "drip": "timeout",
    "drip of headers": "timeout",
    "truncated": "truncated",
    "truncated json": "not_json",
    "html": "not_json",
    "deep json": "not_json",
    "closed": "closed",
    "reset": "closed",
    "not http": "not_http",
    "no choices": "no_choices",
    "error in 200": "no_choices",
    "list": "no_choices",
}
"""How a client should count each fault."""
