"""What a server that is started again still knows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.flows.installation.test_prefect_password import Running

pytestmark = pytest.mark.system


def test_slots_of_gpus_are_given_back_to_a_server_that_was_started_again(tmp_path: Path) -> None:
    running = Running(tmp_path)

    def ask(method: str, path: str, **body: Any) -> httpx.Response:
        url, deadline = f"{running.url}/api/v2/concurrency_limits/{path}", time.monotonic() + 120
        while True:
            answer = httpx.request(method, url, auth=running.auth, timeout=60, json=body or None)
            if answer.status_code != 503 or time.monotonic() > deadline:  # SQLite is locked; Prefect's client retries
                answer.raise_for_status()
                return answer
            time.sleep(0.5)

    try:
        ask("POST", "", name="r1-gpus", limit=3)
        lease = ask("POST", "increment-with-lease", names=["r1-gpus"], slots=2, lease_duration=600).json()["lease_id"]
        assert ask("GET", "r1-gpus").json()["active_slots"] == 2
        running.stop()
        running = Running(tmp_path)
        assert ask("GET", "r1-gpus").json()["active_slots"] == 2
        ask("POST", "decrement-with-lease", lease_id=lease)
        assert ask("GET", "r1-gpus").json()["active_slots"] == 0
    finally:
        running.stop()
