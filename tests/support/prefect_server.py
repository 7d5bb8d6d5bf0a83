"""A real Prefect server for tests, and a run of the recipe that comes to a gate which asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from flows.prefect_server import free_port, is_open
from tests.support.r1 import R1

GATE = (
    'gates=[{name = "enough", after = "problems", on_failure = "ask", '
    'conditions = [{metric = "reasoning_train", above = 1000000}]}]'
)
SMALL = ["problems.sources.0.count=120", "problems.sources.1.count=60", GATE]
DEADLINE_S = 600.0


class Server:
    """A Prefect server over a folder of its own: what it knows outlives its process."""

    def __init__(self, folder: Path):
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "flows.prefect_server", str(self.port), str(os.getpid())]
        place = {
            "PREFECT_HOME": str(self.folder),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_UI_API_URL": self.url,
            "PREFECT_UI_STATIC_DIRECTORY": str(self.folder / "pages"),
            "PREFECT_API_DATABASE_TIMEOUT": "60",  # s; on a busy machine its parts wait for each other
        }
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **place}, stdout=log, stderr=log, start_new_session=True
            )
        wait(self._answers, "the server")

    def _answers(self) -> bool:
        return is_open(self.port) and httpx.get(f"{self.url}/health", timeout=30).status_code == 200

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(timeout=DEADLINE_S)

    def ask(self, method: str, path: str, **body: Any) -> Any:
        def answered() -> httpx.Response | None:
            answer = httpx.request(method, f"{self.url}{path}", json=body or None, timeout=DEADLINE_S)
            return None if answer.status_code == 503 else answer  # its database is busy: it did nothing

        answer = wait(answered, f"an answer to {path}")
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def run_in(self, *states: str, flow: str = "train-r1") -> dict[str, Any] | None:
        """The newest run of a flow, if it is in one of these states."""
        runs = self.ask("POST", "/flow_runs/filter", sort="START_TIME_DESC", flows={"name": {"any_": [flow]}})
        return runs[0] if runs and runs[0]["state"]["name"] in states else None

    def answer(self, run: dict[str, Any], **form: Any) -> None:
        done = self.ask("POST", f"/flow_runs/{run['id']}/resume", run_input=form)
        assert done["status"] == "ACCEPT", done


def wait(found: Any, what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (value := found()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.3)
    return value


def start_run(
    r1: R1, server: Server, settings: Sequence[str] = SMALL, arguments: Sequence[str] = ("--only", "problems")
) -> subprocess.Popen[str]:
    sets = [part for value in settings for part in ("--set", value)]
    command = r1.command("run", "tiny", *sets, *arguments, "--json")
    environment = {**r1.environment(), "PREFECT_API_URL": server.url}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def decision(r1: R1) -> dict[str, Any]:
    """The only one that was kept."""
    (line,) = [line for path in r1.home.glob("gates/*.jsonl") for line in path.read_text().splitlines()]
    return json.loads(line)
