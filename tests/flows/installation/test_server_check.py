"""The message where no Prefect server answers."""

from __future__ import annotations

import http.server
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.home import home
from flows.prefect_server import _OwnServer, check_server, free_port, prefect_server
from grpo.errors import InputError

pytestmark = pytest.mark.system


def test_a_server_that_is_not_named_or_does_not_answer_is_one_line() -> None:
    with pytest.raises(InputError, match="no Prefect server is named; start one with `r1 up`, or set PREFECT_API_URL"):
        check_server(None)
    url = f"http://127.0.0.1:{free_port()}/api"
    with pytest.raises(InputError, match=rf"{url}: no Prefect server answers \(.+\); start it") as refused:
        check_server(url)
    assert "\n" not in str(refused.value)
    # `r1 run` asks it as well.
    asked = pytest.raises(InputError, match="no Prefect server answers")
    with temporary_settings({PREFECT_API_URL: url}), asked, prefect_server(home() / "logs"):
        raise AssertionError("it was not asked")


def test_another_server_is_not_taken_for_prefect() -> None:
    other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        with pytest.raises(InputError, match="it is not Prefect's API; PREFECT_API_URL ends in /api"):
            check_server(f"http://127.0.0.1:{other.server_address[1]}")
    finally:
        other.shutdown()
        other.server_close()


def test_a_temporary_server_answers_no_other_host_origin_or_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    server = _OwnServer(home() / "logs")
    try:
        url, auth = f"{server.wait()}/flows/count", tuple(server.password.split(":"))

        def ask(auth: tuple[str, ...] | None = auth, **headers: str) -> httpx.Response:
            return httpx.post(url, json={}, headers=headers, auth=auth, timeout=60)

        assert ask().status_code == 200
        assert ask(None).status_code == 401
        assert ask(Host="evil.example").status_code == 400
        own, other = f"http://127.0.0.1:{server.port}", "http://evil.example"
        asked = {"Access-Control-Request-Method": "POST"}
        allowed = [
            httpx.options(url, headers={"Origin": origin, **asked}, timeout=60).headers for origin in (own, other)
        ]
        assert [headers.get("access-control-allow-origin") for headers in allowed] == [own, None]
    finally:
        server.stop()


def test_two_servers_of_a_new_home_start_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would make the same tables, and fail."""
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    servers = [_OwnServer(home() / "logs"), _OwnServer(home() / "logs")]
    try:
        with ThreadPoolExecutor() as threads:
            urls = list(threads.map(_OwnServer.wait, servers))
        assert [check_server(url) for url in urls] == urls
    finally:
        for started in servers:
            started.stop()


def test_few_open_files_are_one_line(tmp_path: Path) -> None:
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (127, most))
    try:
        with pytest.raises(InputError, match=r"may open 127 files here, and the local Prefect server needs 128; raise"):
            _OwnServer(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


def test_a_server_that_listens_but_never_answers_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel accepts connections, so that a client would wait."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    server = _OwnServer(tmp_path / "logs")
    try:
        server.wait()
        os.kill(server.process.pid, signal.SIGSTOP)
        server.deadline = 0.0
        with pytest.raises(InputError, match="the local Prefect server did not start; see"):
            server.wait()
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
        server.stop()


def test_a_server_that_ends_during_a_run_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))

    @flow
    def nothing() -> None:
        pass

    few_retries = temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0})
    ended = pytest.raises(InputError, match="the local Prefect server ended .*; see .*; the same command again goes on")
    with few_retries, ended, prefect_server(tmp_path / "logs"):
        nothing()
        port = int(PREFECT_API_URL.value().split(":")[2].split("/")[0])
        [server] = [child for child in psutil.Process().children() if str(port) in child.cmdline()]
        server.kill()
        server.wait()
        nothing()
