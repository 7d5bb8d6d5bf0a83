"""A real OpenAI-compatible service on a real socket, whose faults a test turns on and off."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ModelService(ThreadingHTTPServer):
    """Answers with the sum that the last message asks for, after `seconds`.

    `fault`: a status to answer with, "hang", "close", or None. `room`: requests at once, more get 429. `seeds`: of the
    requests that were answered. `most_at_once` and `hung_up` (clients that left) are counted.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, seconds: float = 0.0, fault: int | str | None = None, room: int = 10_000):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seconds, self.fault, self.room = seconds, fault, room
        self.seeds: list[int] = []
        self.at_once = self.most_at_once = self.hung_up = self.probes = self.requests = 0
        self.lock, self.freed = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def close(self) -> None:
        self.freed.set()
        self.shutdown()
        self.server_close()

    def __enter__(self) -> ModelService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: clients leave on purpose."""


class _Handler(BaseHTTPRequestHandler):
    server: ModelService
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.probes += 1
        if self.server.fault == "close":
            self.close_connection = True
            return
        self._send(self.server.fault if isinstance(self.server.fault, int) else 200, {"data": []})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests += 1
            full = server.at_once >= server.room
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        try:
            self._answer(body, 429 if full else server.fault)
        finally:
            with server.lock:
                server.at_once -= 1

    def _answer(self, body: dict[str, Any], fault: int | str | None) -> None:
        server = self.server
        if fault == "hang":
            self.connection.settimeout(0.02)
            while not server.freed.is_set():
                try:
                    if not self.connection.recv(1):
                        server.hung_up += 1
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
        if fault in ("hang", "close"):
            self.close_connection = True
            return
        if isinstance(fault, int):
            self._send(fault, {"error": {"message": "out of order"}})
            return
        time.sleep(server.seconds)
        with server.lock:
            server.seeds.append(body["seed"])
        content = f"<think>\n{body['seed'] % 10}\n</think>\n<answer>{body['seed'] % 7}</answer>"
        message = {"role": "assistant", "content": content}
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        self._send(200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    def _send(self, status: int, reply: dict[str, Any]) -> None:
        text = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass
