"""A gate that asks in Prefect: a real server, real flow runs, answers through its API, and the server's restart."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.server import free_port, is_open
from tests.flows.conftest import R1

GATE = (
    'gates=[{name = "enough", after = "problems", on_failure = "ask", '
    'conditions = [{metric = "reasoning_train", above = 1000000}]}]'
)
SMALL = ["problems.sources.0.count=60", "problems.sources.1.count=60", "problems.sources.2.count=60", GATE]
DEADLINE_S = 600.0


class Server:
    """A Prefect server over a folder of its own: what it knows outlives its process."""

    def __init__(self, folder: Path):
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "flows.server", str(self.port), str(os.getpid())]
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
        answer = httpx.request(method, f"{self.url}{path}", json=body or None, timeout=30)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def run_in(self, *states: str) -> dict[str, Any] | None:
        """The newest run of train-r1, if it is in one of these states."""
        runs = self.ask("POST", "/flow_runs/filter", sort="START_TIME_DESC", flows={"name": {"any_": ["train-r1"]}})
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("prefect"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def small(tmp_path: Path) -> R1:
    return R1(tmp_path / "home")


def start(r1: R1, server: Server) -> subprocess.Popen[str]:
    sets = [part for value in SMALL for part in ("--set", value)]
    command = r1.command("run", "tiny", *sets, "--only", "problems", "--json")
    environment = {**r1.environment(), "PREFECT_API_URL": server.url}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_run_waits_and_goes_on_after_the_server_was_restarted(server: Server, small: R1) -> None:
    process = start(small, server)
    run = wait(lambda: server.run_in("Paused"), "the pause")
    keys = run["state"]["state_details"]["run_input_keyset"]
    schema = server.ask("GET", f"/flow_runs/{run['id']}/input/{keys['schema']}")
    assert (
        set(schema["properties"]) == {"approve", "note", "who"} and schema["properties"]["approve"]["default"] is False
    )
    shown = server.ask("GET", f"/flow_runs/{run['id']}/input/{keys['description']}")
    assert "**failed** | reasoning_train of problems is " in shown
    artifact = server.ask("GET", "/artifacts/gate-tiny-enough/latest")
    assert artifact["data"] == shown and artifact["flow_run_id"] == run["id"]
    server.stop()
    server.start()
    server.answer(run, approve=True, note="on purpose", who="Ada")
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors[-2000:]
    result = json.loads(output.splitlines()[-1])
    assert result["gates"][0]["status"] == "approved"
    (line,) = [line for path in small.home.glob("gates/*.jsonl") for line in path.read_text().splitlines()]
    decision = json.loads(line)
    assert (decision["approved"], decision["who"], decision["note"]) == (True, "Ada", "on purpose")
    # It survives: the same run again asks nobody.
    process = start(small, server)
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0 and json.loads(output.splitlines()[-1])["gates"][0]["status"] == "approved"


@pytest.mark.slow
def test_a_refusal_ends_the_run_in_one_line(server: Server, small: R1) -> None:
    process = start(small, server)
    run = wait(lambda: server.run_in("Paused"), "the pause")
    server.answer(run, approve=False, note="too few")
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert errors.strip().splitlines()[-1] == (
        "stopped: gate 'enough' after problems was refused by someone in Prefect: too few"
    )
    assert wait(lambda: server.run_in("Failed"), "the end")["id"] == run["id"]
    assert json.loads(output.splitlines()[-1])["gates"][0]["status"] == "refused"


@pytest.mark.slow
def test_a_deployed_run_is_suspended_and_its_worker_goes_home(server: Server, small: R1) -> None:
    """Suspended frees the process. Resumed, also after server and runner were restarted, the run starts again and finds
    its stage made."""
    environment = {**small.environment(), "PREFECT_API_URL": server.url, "PREFECT_RUNNER_POLL_FREQUENCY": "2"}
    with _serving(environment, small.home.parent / "runner.log") as runner:
        deployment = wait(lambda: _deployment(server), "the deployment")
        parameters = {"recipe": "tiny", "overrides": SMALL, "only": "problems"}
        made = server.ask("POST", f"/deployments/{deployment}/create_flow_run", parameters=parameters)
        wait(lambda: _flow_processes(runner.pid), "the process of the run")
        run = wait(lambda: server.run_in("Suspended"), "the suspension")
        assert run["id"] == made["id"]
        wait(lambda: not _flow_processes(runner.pid), "the end of the process that was suspended")
    server.stop()
    server.start()
    with _serving(environment, small.home.parent / "runner.log"):
        server.answer(run, approve=True, note="seen", who="Ada")
        done = wait(lambda: server.run_in("Completed", "Failed", "Crashed"), "the end")
        assert (done["id"], done["state"]["name"]) == (run["id"], "Completed")
    states = server.ask("GET", f"/flow_run_states/?flow_run_id={run['id']}")
    named = [state["name"] for state in sorted(states, key=lambda state: state["timestamp"])]
    assert [name for name in named if name in ("Running", "Suspended", "Resuming")] == [
        "Running", "Suspended", "Resuming", "Running"
    ]  # fmt: skip
    assert len(list(small.home.glob("artifacts/problems/*/*"))) == 1  # made once, reused after the resumption
    (line,) = [line for path in small.home.glob("gates/*.jsonl") for line in path.read_text().splitlines()]
    assert json.loads(line)["who"] == "Ada"


@contextlib.contextmanager
def _serving(environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`train_r1.serve` in a process; all of its processes are gone afterwards."""
    code = (
        "from flows.home import prepare_environment as p; p(); from flows.r1 import train_r1; train_r1.serve('gated')"
    )
    with log.open("ab") as output:
        runner = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield runner
    finally:
        os.killpg(runner.pid, signal.SIGKILL)
        runner.wait()


def _deployment(server: Server) -> str | None:
    found = server.ask("POST", "/deployments/filter", deployments={"name": {"any_": ["gated"]}})
    return found[0]["id"] if found else None


def _flow_processes(runner: int) -> list[str]:
    """Commands of the runner's children that run a flow; another child, Python's resource tracker, stays."""
    children = [
        int(pid) for path in Path(f"/proc/{runner}/task").glob("*/children") for pid in path.read_text().split()
    ]
    commands = []
    for pid in children:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            commands.append(Path(f"/proc/{pid}/cmdline").read_text())
    return [command for command in commands if "spawn_main" in command]
