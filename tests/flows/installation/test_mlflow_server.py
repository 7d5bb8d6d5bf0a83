"""MLflow's server as `r1 up` starts it answers requests for its own address alone, and pages of other origins not at
all."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from flows.installation.services import Databases, mlflow_server
from flows.prefect_server import free_port, is_open

pytestmark = pytest.mark.system
SEARCH = "/api/2.0/mlflow/experiments/search"
CREATE = "/api/2.0/mlflow/experiments/create"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home, port = tmp_path_factory.mktemp("home"), free_port()
    service = mlflow_server(home, port, Databases(None, f"sqlite:///{home}/mlflow.db"))
    with (home / "server.log").open("ab") as log:
        process = subprocess.Popen(service.command, env={**os.environ, **service.settings}, stdout=log, stderr=log)
    deadline = time.monotonic() + 300
    while not is_open(port):
        assert process.poll() is None and time.monotonic() < deadline, (home / "server.log").read_text()
        time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(60)


def post(url: str, name: str, **headers: str) -> int:
    return httpx.post(url + CREATE, json={"name": name}, headers=headers, timeout=60).status_code


def test_another_name_for_this_address_is_refused(url: str) -> None:
    assert httpx.post(url + SEARCH, json={"max_results": 5}, timeout=60).status_code == 200
    other = {"Host": "rebound.example"}
    assert httpx.post(url + SEARCH, json={"max_results": 5}, headers=other, timeout=60).status_code == 403
    assert httpx.get(url, headers=other, timeout=60).status_code == 403


def test_a_page_of_another_origin_may_neither_write_nor_read(url: str) -> None:
    assert post(url, "theirs", Origin="http://other.example") == 403
    assert post(url, "ours", Origin=url) == 200
    found = httpx.post(url + SEARCH, json={"max_results": 5}, headers={"Origin": "http://other.example"}, timeout=60)
    assert "access-control-allow-origin" not in found.headers
    names = httpx.post(url + SEARCH, json={"max_results": 5}, timeout=60).json()["experiments"]
    assert "ours" in {experiment["name"] for experiment in names}
    assert "theirs" not in {experiment["name"] for experiment in names}
