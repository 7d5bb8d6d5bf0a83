"""Report pages at the Prefect server of a home: what a browser gets, and where the link of a run leads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from flows.home import STATE
from flows.installation.prefect_app import OwnPages
from flows.run import report
from flows.run.report import _address, default_path

RUN = "0123456789abcdef"
PREFECT = "http://127.0.0.1:4200/api"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    default_path(RUN).parent.mkdir()
    default_path(RUN).write_text("<h1>tiny</h1>")
    (tmp_path / "secret.html").write_text("secret")
    return tmp_path


@pytest.fixture
def browser() -> TestClient:
    return TestClient(OwnPages(PlainTextResponse("Prefect")))


def test_a_report_is_a_page_of_an_origin_of_its_own(browser: TestClient) -> None:
    answer = browser.get(f"/r1-reports/{default_path(RUN).name}")
    assert answer.status_code == 200 and answer.text == "<h1>tiny</h1>"
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    # Prefect keeps the password in the storage of its origin.
    assert policy.startswith("sandbox ") and "allow-same-origin" not in policy and "default-src 'none'" in policy


@pytest.mark.parametrize("path", ["ffff.html", "..%2Fsecret.html", "../secret.html", "secret.html", ""])
def test_nothing_else_is_served(browser: TestClient, path: str) -> None:
    answer = browser.get(f"/r1-reports/{path}")
    assert "secret" not in answer.text and (answer.status_code == 404 or answer.text == "Prefect")


def test_all_other_pages_are_prefects(browser: TestClient) -> None:
    assert browser.get("/runs").text == "Prefect"


class Record:
    """MLflow, with a server or without one."""

    def __init__(self, server: str | None):
        self.server = server

    def page(self, run_id: str, file: str) -> str | None:
        return f"{self.server}/{run_id}/{file}" if self.server else None


@pytest.mark.parametrize("mlflow", [None, "http://mlflow"])
@pytest.mark.parametrize("own", [True, False])
def test_the_link_is_an_address_that_a_browser_opens(home: Path, mlflow: str | None, own: bool) -> None:
    (home / STATE).write_text(json.dumps({"prefect": PREFECT}))
    record: Any = Record(mlflow)
    with temporary_settings({PREFECT_API_URL: PREFECT if own else "http://elsewhere:4200/api"}):
        link = _address(record, RUN, default_path(RUN))
    at_mlflow = f"http://mlflow/{RUN}/{report.PAGE}" if mlflow else None  # never a file
    assert link == ("http://127.0.0.1:4200/r1-reports/0123456789ab.html" if own else at_mlflow)
