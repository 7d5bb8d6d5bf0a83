"""A gate that asks in Prefect: a real server, real flow runs, answers through its API, and the server's restart."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.prefect_server import DEADLINE_S, SMALL, Server, decision, start_run, wait
from tests.support.r1 import R1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("prefect"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def small(tmp_path: Path) -> R1:
    return R1(tmp_path / "home")


@pytest.mark.slow
def test_a_run_waits_and_goes_on_after_the_server_was_restarted(server: Server, small: R1) -> None:
    process = start_run(small, server)
    run = wait(lambda: server.run_in("Paused"), "the pause")
    keys = run["state"]["state_details"]["run_input_keyset"]
    schema = server.ask("GET", f"/flow_runs/{run['id']}/input/{keys['schema']}")
    assert (
        set(schema["properties"]) == {"approve", "note", "who"} and schema["properties"]["approve"]["default"] is False
    )
    shown = server.ask("GET", f"/flow_runs/{run['id']}/input/{keys['description']}")
    assert "- **failed**: reasoning_train of problems is " in shown
    artifact = server.ask("GET", "/artifacts/gate-tiny-enough/latest")
    assert artifact["data"] == shown and artifact["flow_run_id"] == run["id"]
    server.stop()
    server.start()
    server.answer(run, approve=True, note="on purpose", who="Ada")
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors[-2000:]
    result = json.loads(output.splitlines()[-1])
    assert result["gates"][0]["status"] == "approved"
    decided = decision(small)
    assert (decided["approved"], decided["who"], decided["note"]) == (True, "Ada", "on purpose")
    # It survives: the same run again asks nobody.
    process = start_run(small, server)
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0 and json.loads(output.splitlines()[-1])["gates"][0]["status"] == "approved"


@pytest.mark.slow
def test_a_refusal_ends_the_run_in_one_line(server: Server, small: R1) -> None:
    process = start_run(small, server)
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
        assert recorded(small) == [("WAITING", None)]
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
    assert decision(small)["who"] == "Ada"
    assert recorded(small) == [("FINISHED", None)]


def recorded(r1: R1) -> list[tuple[str, str | None]]:
    """Of each recipe run: its status, and the stage that failed."""
    return [(run["status"], run["failed"]) for run in json.loads(r1("runs", "--json").stdout)["runs"]]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["FAILED", "CANCELLED"])
def test_a_retry_asks_again_if_nobody_answered(server: Server, small: R1, end: str) -> None:
    environment = {**small.environment(), "PREFECT_API_URL": server.url, "PREFECT_RUNNER_POLL_FREQUENCY": "2"}
    with _serving(environment, small.home.parent / "runner.log"):
        deployment = wait(lambda: _deployment(server), "the deployment")
        parameters = {"recipe": "tiny", "overrides": SMALL, "only": "problems"}
        made = server.ask("POST", f"/deployments/{deployment}/create_flow_run", parameters=parameters)

        def suspended() -> Any:
            run = server.ask("GET", f"/flow_runs/{made['id']}")
            return run if run["state"]["name"] == "Suspended" else None

        wait(suspended, "the suspension")
        for state in ({"type": end}, {"type": "SCHEDULED", "name": "AwaitingRetry"}):  # as the UI's "Retry" does
            server.ask("POST", f"/flow_runs/{made['id']}/set_state", state=state)
        run = wait(suspended, "the second suspension")
        assert not [*small.home.glob("gates/*")]
        server.answer(run, approve=True, note="late", who="Ada")

        def ended() -> Any:
            run = server.ask("GET", f"/flow_runs/{made['id']}")
            return run["state"]["name"] if run["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED") else None

        assert wait(ended, "the end") == "Completed"
    assert decision(small)["who"] == "Ada"


@contextlib.contextmanager
def _serving(environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`train_r1.serve` in a process; all of its processes are gone afterwards."""
    code = (
        "from flows.home import prepare_environment as p; p(); "
        "from flows.prefect_flows import train_r1; train_r1.serve('gated')"
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
