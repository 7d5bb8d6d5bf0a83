"""What `r1 deploy` says where no Prefect server is."""

from __future__ import annotations

import asyncio
import http.server
import threading

import pytest

from flows.deploy import _server
from flows.server import free_port
from grpo.errors import InputError


def test_a_server_that_is_not_named_or_does_not_answer_is_one_line() -> None:
    with pytest.raises(InputError, match="no Prefect server is named; start one with `r1 ui`, or set PREFECT_API_URL"):
        asyncio.run(_server(None))
    url = f"http://127.0.0.1:{free_port()}/api"
    with pytest.raises(InputError, match=rf"{url}: no Prefect server answers \(.+\); start it") as refused:
        asyncio.run(_server(url))
    assert "\n" not in str(refused.value)


def test_another_server_is_not_taken_for_prefect() -> None:
    other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        with pytest.raises(InputError, match="it is not Prefect's API; PREFECT_API_URL ends in /api"):
            asyncio.run(_server(f"http://127.0.0.1:{other.server_address[1]}"))
    finally:
        other.shutdown()
        other.server_close()
