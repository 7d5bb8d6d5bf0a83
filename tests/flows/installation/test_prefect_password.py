"""The Prefect server of an installation answers only to who has the home's password, and only under its own name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from flows.home import PREFECT_PASSWORD
from flows.installation.credentials import prefect_password
from flows.installation.prefect_app import SIGN_IN
from flows.installation.services import Databases, prefect_server, sign_in_url
from flows.prefect_server import free_port, is_open


def test_the_password_is_one_file_that_only_its_user_reads(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        passwords = set(pool.map(lambda _: prefect_password(tmp_path), range(8)))
    assert len(passwords) == 1 and len(passwords.pop()) > 40
    path = tmp_path / PREFECT_PASSWORD
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in path.parent.iterdir()] == [path.name]


class Running:
    """A server as `r1 up` starts it."""

    def __init__(self, home: Path) -> None:
        self.home, self.port = home, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.auth = tuple(prefect_password(home).split(":", 1))
        service = prefect_server(home, self.port, Databases(None, ""))
        place = {"PREFECT_HOME": str(home / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        with (home / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                service.command, env={**os.environ, **place, **service.settings}, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 300
        while not is_open(self.port):
            assert self.process.poll() is None and time.monotonic() < deadline, (home / "server.log").read_text()
            time.sleep(0.2)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)

    def post_run(self, **options: object) -> httpx.Response:
        """An attacker's first request: create a flow."""
        return httpx.post(f"{self.url}/api/flows/", json={"name": "shell"}, timeout=60, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("home"))
    yield running
    running.stop()


@pytest.mark.system
def test_only_the_password_opens_the_api(server: Running) -> None:
    assert httpx.get(f"{server.url}/api/health", timeout=60).status_code == 200
    assert server.post_run().status_code == 401
    assert server.post_run(auth=("r1flow", "wrong")).status_code == 401
    assert server.post_run(auth=server.auth).status_code in (200, 201)


@pytest.mark.system
def test_another_name_for_this_address_is_refused(server: Running) -> None:
    assert server.post_run(auth=server.auth, headers={"Host": "rebound.example"}).status_code == 400
    assert httpx.get(server.url, headers={"Host": "rebound.example"}, timeout=60).status_code == 400


@pytest.mark.system
def test_a_page_of_another_origin_may_not_read(server: Running) -> None:
    asked = {"Origin": "http://other.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{server.url}/api/flows/", headers=asked, timeout=60)
    assert "access-control-allow-origin" not in answer.headers
    answer = httpx.get(f"{server.url}/api/health", headers={"Origin": "http://other.example"}, timeout=60)
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.system
def test_prefects_client_reads_the_password_from_the_environment(server: Running) -> None:
    code = "from prefect import get_client; print(get_client(sync_client=True).read_flows())"
    place = {"PREFECT_HOME": str(server.home / "client"), "PREFECT_API_URL": f"{server.url}/api"}
    environment = {**os.environ, **place, "PREFECT_API_AUTH_STRING": ":".join(server.auth)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.system
def test_the_link_stores_the_password_where_prefects_pages_read_it(server: Running) -> None:
    address, _, fragment = sign_in_url(server.home, server.port).partition("#")
    assert address.endswith(SIGN_IN) and ":".join(server.auth) not in address
    page = httpx.get(address, timeout=60)
    assert "prefect-password" in page.text and fragment not in page.text
    assert page.headers["referrer-policy"] == "no-referrer"


@pytest.mark.slow
def test_a_browser_is_signed_in_by_the_link_and_other_origins_can_do_nothing(server: Running) -> None:
    pytest.importorskip("playwright.sync_api", reason="playwright is missing: make install")
    from tests.support.pages import CHROMIUM, browser_page

    if CHROMIUM is None:
        pytest.skip("needs the program chromium")
    foreign = server.home / "foreign.html"
    foreign.write_text("<title>elsewhere</title>")
    post = f"fetch('{server.url}/api/flows/', {{method: 'POST', body: '{{\"name\": \"evil\"}}'}}).then(r => r.status)"
    with browser_page() as page:
        page.goto(sign_in_url(server.home, server.port))
        page.wait_for_url("**/dashboard**")
        page.get_by_text("Dashboard").first.wait_for()
        page.goto(f"file://{foreign}")
        assert page.evaluate(f"{post}.catch(() => 'blocked')") == "blocked"
    flows = httpx.post(f"{server.url}/api/flows/filter", json={}, auth=server.auth, timeout=60).json()
    assert "evil" not in {flow["name"] for flow in flows}
